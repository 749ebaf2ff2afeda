"""Every metric of the system, declared once, and its export through Ray's metrics endpoint.

A name that is not declared here cannot be logged. Files and consoles that receive them are in `trackers` and `console`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_disagg.domain.errors import MilesDisaggError


@dataclass(frozen=True)
class Metric:
    """A declared metric: its stable name (PROTOCOL.md sections 4 and 5), unit and meaning."""

    name: str
    unit: str
    help: str

    @property
    def prometheus_name(self) -> str:
        """Name given to Ray, which prefixes `ray_`: `perf/step_seconds` -> `miles_perf_step_seconds`."""
        return "miles_" + re.sub(r"[^a-zA-Z0-9]", "_", self.name)


def _declare(rows: Iterable[tuple[str, str, str]]) -> dict[str, Metric]:
    out = {name: Metric(name, unit, text) for name, unit, text in rows}
    return out


METRICS: Mapping[str, Metric] = _declare(
    [
        ("rollout/reward_mean", "1", "mean reward of the consumed batch"),
        ("rollout/reward_std", "1", "standard deviation of rewards in the consumed batch"),
        ("rollout/response_length_mean", "tokens", "mean response length of the consumed batch"),
        ("rollout/truncated_fraction", "1", "share of samples that ended at the length limit"),
        ("rollout/zero_variance_groups", "groups", "groups whose rewards are all equal: they carry no gradient"),
        ("rollout/version_lag_mean", "versions", "mean lag of consumed samples (oldest token)"),
        ("rollout/version_lag_max", "versions", "largest lag of any consumed sample (oldest token)"),
        ("rollout/version_lag_histogram", "samples", "number of consumed samples by their lag (metrics.jsonl)"),
        ("rollout/samples_per_second", "1/s", "samples consumed by the trainer per second of wall time"),
        ("rollout/in_flight", "samples", "samples being generated when the batch was taken"),
        ("rollout/fully_async/queue_size", "groups", "groups waiting in the data buffer"),
        ("rollout/fully_async/aborted_groups_filtered", "groups", "groups dropped because a generation failed"),
        ("rollout/fully_async/stale_groups_filtered", "groups", "groups dropped as too stale, so far"),
        ("rollout/fully_async/avg_staleness", "versions", "mean staleness of groups in the buffer"),
        ("rollout/fully_async/max_staleness", "versions", "largest staleness of groups in the buffer"),
        (
            "rollout/ledger/generated",
            "groups",
            "generated so far = trained + queued + dropped + in flight",
        ),
        ("rollout/ledger/trained", "groups", "of these, trained on"),
        ("rollout/ledger/queued", "groups", "of these, in the data buffer"),
        ("rollout/ledger/dropped", "groups", "of these, dropped (summary.json says why)"),
        ("rollout/ledger/in_flight", "groups", "of these, on their way to the buffer or with the trainer"),
        ("rollout/ledger/retried", "groups", "hand-outs of a prompt that had been dropped before"),
        ("rollout/ledger/given_up", "prompts", "prompts that failed every time and are not handed out any more"),
        ("eval/accuracy", "1", "greedy accuracy on held-out prompts"),
        ("eval/weight_version", "version", "policy version that was evaluated"),
        ("eval/seconds", "s", "wall time of the evaluation"),
        ("eval/pin_seconds", "s", "until engines of evaluation alone served the version, its publication included"),
        ("eval/failed", "prompts", "held-out prompts without an answer; not in the accuracy"),
        ("eval/skipped", "evaluations", "evaluations skipped so far; the reasons are in evaluations.jsonl"),
        ("train/loss", "1", "loss of the optimizer steps of this rollout step"),
        ("train/pg_loss", "1", "policy-gradient part of the loss"),
        ("train/grad_norm", "1", "gradient norm before clipping"),
        ("train/entropy", "nats", "mean token entropy of the policy"),
        ("train/clip_fraction", "1", "share of tokens whose ratio was clipped"),
        ("train/kl", "nats", "mean KL to the reference"),
        ("train/tis_mean", "1", "mean truncated importance weight against the engine's logprobs"),
        ("train/tis_capped_fraction", "1", "share of tokens whose importance weight was truncated"),
        ("train/rejected_fraction", "1", "share of tokens whose policy term was rejected"),
        ("train/rollout_logprob_abs_diff", "nats", "mean |trainer's logprob - engine's logprob| of all tokens"),
        ("train/rollout_logprob_abs_diff_on_policy", "nats", "the same, of tokens that the trainer's version wrote"),
        ("train/opd_reverse_kl", "nats", "mean of policy's logprob minus teacher's, of the sampled tokens"),
        ("train/value_loss", "1", "clipped squared error of the critic's values, halved"),
        ("train/value_clip_fraction", "1", "share of tokens whose value loss was clipped"),
        ("train/value_mean", "1", "mean value that the critic gives before its step"),
        ("train/return_mean", "1", "mean return that the critic learns"),
        ("train/value_explained_variance", "1", "share of the returns' variance that the values explain"),
        ("train/critic_grad_norm", "1", "the critic's gradient norm before clipping"),
        ("train/critic_lr", "1", "the critic's learning rate of the last optimizer step"),
        ("train/lr", "1", "learning rate of the last optimizer step"),
        ("train/tokens", "tokens", "prompt and response tokens of this step"),
        ("train/micro_batches", "1", "micro-batches per rank and optimizer step"),
        ("perf/step_seconds", "s", "wall time of the whole step"),
        ("perf/train_seconds", "s", "wall time of the optimizer steps"),
        ("perf/wait_for_rollout_seconds", "s", "time the trainer waited for a batch"),
        ("perf/wait_for_publication_seconds", "s", "time the trainer waited for the previous publication"),
        ("perf/tokens_per_second", "tokens/s", "response tokens trained on per second of wall time"),
        ("perf/save_checkpoint_seconds", "s", "time the trainer stood still for a checkpoint"),
        ("perf/wait_for_checkpoint_seconds", "s", "the part of it spent waiting for the checkpoint before"),
        ("perf/write_checkpoint_seconds", "s", "writing and verifying a checkpoint, behind the steps"),
        ("perf/update_weights_export_seconds", "s", "copying the weights out of the trainer"),
        ("perf/update_weights_encode_seconds", "s", "diff, encode and digest"),
        ("perf/update_weights_write_seconds", "s", "writing or sending the payload"),
        ("perf/update_weights_commit_seconds", "s", "writing the index and moving the pointer"),
        ("perf/update_weights_density", "1", "share of elements that changed"),
        ("perf/update_weights_wire_bytes", "bytes", "payload bytes of the publication"),
        ("perf/update_weights_trainer_stall_seconds", "s", "time the trainer stood still for the publication"),
        ("replica/fetch_seconds", "s", "fetching a version's payload, slowest replica"),
        ("replica/materialize_seconds", "s", "building the verified checkpoint, slowest replica"),
        ("replica/stage_seconds", "s", "preparing an activation before the pause, slowest replica"),
        ("replica/pause_seconds", "s", "engine paused for the activation, slowest replica"),
        ("fleet/convergence_seconds", "s", "publication until the required share of replicas serves it"),
        ("fleet/replicas_ready", "replicas", "replicas that serve a version"),
        ("perf/update_weights_anchor_bytes", "bytes", "anchor and folded delta written beside the version"),
        ("perf/update_weights_anchor_seconds", "s", "writing the anchor and the folded delta"),
        ("weights/unchanged_publications", "publications", "publications in a row that changed no byte"),
        ("weights/policy_does_not_move", "1", "1 while the alarm for a policy that does not move is on"),
    ]
)


class UndeclaredMetric(MilesDisaggError):
    """A metric that is logged must be declared in observe/metrics.py first."""


def check_declared(values: Mapping[str, Any]) -> None:
    """Raise UndeclaredMetric if any name is not in METRICS."""
    unknown = sorted(set(values) - set(METRICS))
    if unknown:
        raise UndeclaredMetric(f"undeclared metric(s) {unknown}: declare them in miles_disagg/observe/metrics.py")


class RayMetrics:
    """Gauges on Ray's metrics endpoint, as `ray_miles_<name>`, tagged with the run id. One instance per process."""

    def __init__(self, run_id: str):
        self._run_id = run_id
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Set every gauge in `values`; creates each once. Needs an initialised Ray."""
        from ray.util.metrics import Gauge

        check_declared(values)
        for name, value in values.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                metric = METRICS[name]
                gauge = Gauge(
                    metric.prometheus_name, description=f"{metric.help} [{metric.unit}]", tag_keys=("run_id",)
                )
                gauge.set_default_tags({"run_id": self._run_id})
                self._gauges[name] = gauge
            gauge.set(float(value))

    def close(self) -> None:
        """Nothing to release: Ray exports until the process ends."""
