"""Fill in what follows from other values, so that the saved configuration says everything."""

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from miles_disagg.config.placement import policy_engines
from miles_disagg.config.run import RunConfig


def resolve(config: RunConfig, gpus: int | None = None) -> RunConfig:
    """A configuration with every derived value filled in; resolving twice changes nothing.

    gpus: GPUs in reach (of this machine, or of the Ray cluster); None: unknown, `--trainer-device auto` stays.
    """
    run_id = config.output.run_id or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    run_dir = Path(config.output.run_dir or _runs() / run_id).expanduser().absolute()
    flags: dict[str, object] = {
        "run_id": run_id,
        "run_dir": str(run_dir),
        "global_batch_size": config.trainer.global_batch_size or config.samples_per_step,
        "async_max_concurrent_samples": config.pacing.async_max_concurrent_samples or config.samples_per_step,
        "eps_clip_high": config.loss.eps_clip_high or config.loss.eps_clip,
        "critic_lr": config.critic.critic_lr or (config.optimizer.lr if config.uses_critic else None),
        "update_weight_mode": config.weights.mode,
        "update_weight_transport": config.weights.transport,
        "update_weight_encoding": config.weights.encoding,
        "update_weight_disk_dir": _store_root(config, run_dir),
        "update_weight_local_checkpoint_dir": _absolute(
            config.weights.update_weight_local_checkpoint_dir or str(run_dir / "replicas")
        ),
        "eval_max_response_len": config.evaluation.eval_max_response_len or config.rollout.rollout_max_response_len,
        "eval_num_replicas": config.num_eval_replicas or None,
        "lr_decay_iters": config.optimizer.lr_decay_iters or _optimizer_steps(config),
    }
    if config.engines.sglang_config:
        flags["sglang_config"] = _absolute(config.engines.sglang_config)
        flags["num_rollout_engines"] = len(policy_engines(config))
    elif config.engines.topology == "managed":
        flags["num_rollout_engines"] = config.engines.num_managed_engines or None
    if config.trainer.trainer_device == "auto" and gpus is not None:
        flags["trainer_device"] = "cuda" if gpus else "cpu"
    return config.replace(**flags)


def joins_cluster(config: RunConfig, environ: Mapping[str, str] = os.environ) -> bool:
    """True if the run joins a Ray cluster that is already running, whose resources only Ray knows."""
    return config.cluster.ray_address not in (None, "local") or (
        config.cluster.ray_address is None and bool(environ.get("RAY_ADDRESS"))
    )


def _runs(environ: Mapping[str, str] = os.environ) -> Path:
    """Where runs go by default: here, or in the home directory for a submitted Ray job, whose folder is thrown away."""
    return Path("~/miles-disagg-runs") if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ else Path("runs")


def is_url(place: str) -> bool:
    """True for an object-store address such as s3://bucket/prefix."""
    return "://" in place


def _optimizer_steps(config: RunConfig) -> int | None:
    """Optimizer steps of the whole run, None if it has no length yet."""
    per_step = max(1, config.samples_per_step // (config.trainer.global_batch_size or config.samples_per_step))
    return config.rollout.num_rollout * per_step if config.rollout.num_rollout else None


def _store_root(config: RunConfig, run_dir: Path) -> str:
    return _absolute(config.engines.version_store or config.weights.update_weight_disk_dir or str(run_dir / "weights"))


def _absolute(place: str) -> str:
    return place if is_url(place) else str(Path(place).expanduser().absolute())
