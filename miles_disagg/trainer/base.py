"""The trainer port: what a training run asks of one trainer rank, and the plain data that goes in.

No torch, no Megatron and no Ray here, so that specs can be built and checked before any of them is imported. The
adapter is `megatron/trainer.py`; the Ray shell around it is `actor.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from miles_disagg.publish.peer import LocalShard

NamedTensors = list[tuple[str, "torch.Tensor"]]
ExportSink = Callable[[NamedTensors], None]


@dataclass(frozen=True)
class OptimizerSpec:
    """Adam with decoupled weight decay, gradient clipping by global norm, and a learning-rate schedule.

    Steps are optimizer steps. `constant` ignores `min_lr` and `decay_steps`; `linear` and `cosine` go from `lr` to
    `min_lr` over `decay_steps`, after a linear warm-up of `warmup_steps`. `clip_grad` 0 turns clipping off.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.schedule!r} needs decay_steps > warmup_steps, "
                f"got {self.decay_steps} and {self.warmup_steps}"
            )
        if self.lr < 0 or self.min_lr < 0 or (self.schedule != "constant" and self.min_lr > self.lr):
            raise ValueError(f"learning rates must satisfy 0 <= min_lr <= lr, got min_lr {self.min_lr}, lr {self.lr}")


@dataclass(frozen=True)
class AdvantageSpec:
    """How rewards become advantages (`advantages.py`). normalise_std: of `grpo`; off is Dr. GRPO.

    `ppo` leaves them to the trainer, which estimates them with its critic. custom: import path of an
    `advantages.AdvantageFunction` that is used instead of the estimator. whiten: mean 0 and standard deviation 1 over
    the trained tokens of a rollout batch, whatever the estimator.
    """

    estimator: Literal["grpo", "rloo", "reinforce_plus_plus_baseline", "ppo"] = "grpo"
    normalise_std: bool = True
    custom: str | None = None
    whiten: bool = False


@dataclass(frozen=True)
class CriticSpec:
    """The critic of PPO, a second model of the same backbone with a value for each token instead of logits.

    gamma, lambd: of generalized advantage estimation (`advantages.gae`). value_clip: how far a value may move from
    that of the rollout batch before its loss is clipped. only_steps: first rollout steps that train the critic alone.
    """

    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    gamma: float = 1.0
    lambd: float = 1.0
    value_clip: float = 0.2
    only_steps: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1 or not 0 <= self.lambd <= 1:
            raise ValueError(f"gamma and lambd must be in [0, 1], got {self.gamma} and {self.lambd}")
        if self.value_clip <= 0 or self.only_steps < 0:
            raise ValueError(
                f"value_clip must be positive, only_steps not negative: {self.value_clip}, {self.only_steps}"
            )


Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class LossSpec:
    """The policy loss; formulas and sources in `losses.py` (objective, KL) and `corrections.py` (tis, rs).

    objective: what is done with the ratio pi / pi_proximal, clipped to [1 - clip_low, 1 + clip_high]; dual_clip: upper
    bound, above 1, of the ratio's effect where the advantage is negative (None: none). proximal: `recomputed` by the
    trainer before the first optimizer step of a rollout batch, or the `behaviour` policy's own logprobs.
    tis_cap: upper bound of the importance weight rho = pi_proximal / pi_behaviour (None: no weighting), tis_low its
    lower bound in modes `clip` and `mask`; tis_level: rho of a token, or of its sequence. rs_level: reject where rho
    is outside [rs_low, rs_high] (None: never); rs_veto: reject sequences with a token whose rho is below it.
    kl_coef: weight of the KL estimate to the reference; 0: none. kl_reference: the frozen base model, built here, or a
    server that has scored the samples already (`TrainSample.reference_logprobs`).
    custom: import path of a `losses.PolicyLossFunction` that is used instead of the objective and its clips.
    distill_coef: weight of the teacher's advantage (`losses.distilled`); 0: no teacher.
    aggregate: `token-mean` over all trained tokens of the global batch, `sequence-mean`: mean over samples of
    each sample's token mean, or `constant`: sum over tokens / (samples x constant_length), Dr. GRPO's.
    temperature: sampling temperature of the rollouts; the engine's logprobs are those of logits / temperature.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float | None = 2.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    kl_reference: Literal["local", "served"] = "local"
    aggregate: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    temperature: float = 1.0
    objective: Literal["ppo", "gspo", "cispo"] = "ppo"
    dual_clip: float | None = None
    proximal: Literal["recomputed", "behaviour"] = "recomputed"
    tis_low: float = 0.0
    tis_level: Level = "token"
    tis_mode: Literal["truncate", "clip", "mask"] = "truncate"
    rs_level: Level | None = None
    rs_low: float = 0.0
    rs_high: float = math.inf
    rs_veto: float | None = None
    constant_length: int | None = None
    custom: str | None = None
    distill_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"temperature must be positive, got {self.temperature}: greedy rollouts cannot be trained on"
            )
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise ValueError(f"clip_low must be in [0, 1) and clip_high >= 0, got {self.clip_low} and {self.clip_high}")
        if self.tis_cap is not None and self.tis_cap <= 0:
            raise ValueError(f"tis_cap must be positive (None turns importance sampling off), got {self.tis_cap}")
        if self.tis_cap is not None and not 0 <= self.tis_low <= self.tis_cap:
            raise ValueError(f"tis_low must be in [0, tis_cap], got {self.tis_low} and {self.tis_cap}")
        if not 0 <= self.rs_low <= self.rs_high:
            raise ValueError(f"rs_low must be in [0, rs_high], got {self.rs_low} and {self.rs_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")
        if self.aggregate == "constant" and not self.constant_length:
            raise ValueError("aggregate constant needs constant_length, the tokens that each sample is divided by")

    @property
    def needs_behaviour(self) -> bool:
        """True if the loss cannot be computed without the logprobs of the policy that wrote the tokens."""
        corrected = self.tis_cap is not None or self.rs_level is not None or self.rs_veto is not None
        return corrected or self.proximal == "behaviour"


@dataclass(frozen=True)
class TrainerSpec:
    """Everything that is the same on all trainer ranks. Data parallel size is world_size / (tp * pp).

    expert_parallel: data parallel ranks that a layer's experts are spread over.

    max_tokens_per_micro_batch bounds the packed tokens of one forward pass; a longer single sample is refused.
    meet_timeout, collective_timeout: seconds to wait for all ranks to meet, and for any one collective.
    """

    hf_checkpoint: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    dtype: Literal["fp32", "bf16"] = "bf16"
    use_distributed_optimizer: bool = True
    recompute: Literal["none", "selective", "full"] = "none"
    max_tokens_per_micro_batch: int = 16384
    seed: int = 1234
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    loss: LossSpec = field(default_factory=LossSpec)
    advantages: AdvantageSpec = field(default_factory=AdvantageSpec)
    critic: CriticSpec | None = None
    expert_parallel: int = 1
    meet_timeout: float = 120.0
    collective_timeout: float = 600.0


@dataclass(frozen=True)
class RankSpec:
    """One rank's place. Rank 0 listens on `master_address:master_port`; `local_rank` picks the CUDA device."""

    rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 29500
    local_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.world_size})")


@dataclass(frozen=True)
class TrainSample:
    """One sample as the loss sees it. n is the response length, len(tokens) - prompt_len; prompt_len >= 1.

    tokens: prompt and response ids. loss_mask: 1 where a response token is trained on, length n (None: all ones).
    behaviour_logprobs: natural log-probability of each response token under the policy that wrote it, length n; None
    if nobody knows it, which is an error where the loss needs it.
    advantage: one number for all response tokens, or n numbers; not used where a critic estimates them from `reward`.
    teacher_logprobs, reference_logprobs: of the response tokens under the teacher and under a served reference, length
    n; None without one.
    token_versions: version that wrote each response token, length n; used only to report
    `train/rollout_logprob_abs_diff_on_policy`.
    """

    tokens: Sequence[int]
    prompt_len: int
    behaviour_logprobs: Sequence[float] | None
    advantage: float | Sequence[float]
    loss_mask: Sequence[int] | None = None
    token_versions: Sequence[int] | None = None
    reward: float = 0.0
    teacher_logprobs: Sequence[float] | None = None
    reference_logprobs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        n = len(self.tokens) - self.prompt_len
        if self.prompt_len < 1 or n < 0:
            raise ValueError(f"prompt_len {self.prompt_len} is not in [1, {len(self.tokens)}]")
        for name in ("behaviour_logprobs", "loss_mask", "token_versions", "teacher_logprobs", "reference_logprobs"):
            value = getattr(self, name)
            if value is not None and len(value) != n:
                raise ValueError(f"{name} has {len(value)} entries, the response has {n} tokens")
        if not isinstance(self.advantage, int | float) and len(self.advantage) != n:
            raise ValueError(f"advantage has {len(self.advantage)} entries, the response has {n} tokens")

    @property
    def response_len(self) -> int:
        """Number of response tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def trained_tokens(self) -> int:
        """Number of response tokens that the loss mask keeps."""
        return self.response_len if self.loss_mask is None else sum(1 for m in self.loss_mask if m)


@dataclass(frozen=True)
class Written:
    """What one rank wrote of a checkpoint.

    files: size and xxh3-128 by `<directory>/<file>`, of the bytes as they were handed to the file. entries: where each
    tensor lies, by directory, for whoever describes the whole.
    """

    files: Mapping[str, tuple[int, str]]
    entries: Mapping[str, bytes]


class PendingCheckpoint(Protocol):
    """A checkpoint of one rank that was copied out."""

    def write(self) -> Written:
        """Put this rank's part on disk; from any thread, without the other ranks."""
        ...

    def finish(self, ranks: Sequence[Written]) -> None:
        """On rank 0, with what every rank's `write` returned: let the directory appear, complete."""
        ...


class Trainer(Protocol):
    """One rank of the trainer. Every method except the properties is collective: all ranks call it, in one order."""

    @property
    def is_source(self) -> bool:
        """True on the ranks whose sink `export` calls: tensor rank 0, data rank 0 of each pipeline stage."""
        ...

    @property
    def source_index(self) -> int | None:
        """This source's position among the sources (its pipeline stage), None elsewhere."""
        ...

    @property
    def num_sources(self) -> int:
        """Number of source ranks."""
        ...

    def train_step(
        self, batch: Sequence[TrainSample], *, global_batch_size: int | None = None, version: int | None = None
    ) -> Mapping[str, float]:
        """Train on a rollout batch; every rank gets the whole batch and takes its own part. Returns metrics.

        global_batch_size: samples per optimizer step at most (None: one step); a batch that it does not divide, since
        groups in it shrank, is split evenly. With several steps the proximal policy is the one before the first step.
        version: the trainer's current policy version.
        A critic is trained too: alone on the first `CriticSpec.only_steps` batches, without the policy's metrics.
        Metrics (the same on every rank): train/loss, train/pg_loss, train/grad_norm, train/entropy, train/kl,
        train/clip_fraction, train/tis_mean, train/tis_capped_fraction, train/rejected_fraction, train/lr,
        train/tokens, train/micro_batches,
        train/rollout_logprob_abs_diff, and train/rollout_logprob_abs_diff_on_policy where token versions allow it;
        train/opd_reverse_kl with a teacher; train/value_* and train/critic_* with a critic.
        """
        ...

    def sft_step(self, batch: Sequence[TrainSample]) -> Mapping[str, float]:
        """One supervised optimizer step: mean cross-entropy over the trained response tokens of the batch."""
        ...

    def logprobs(self, batch: Sequence[TrainSample]) -> list[list[float]]:
        """Log-probability of every response token under the current weights, per sample; the same on every rank."""
        ...

    def export(self, sink: ExportSink, bucket_bytes: int = 256 << 20) -> None:
        """Gather the weights under canonical HF names, in the checkpoint's dtypes, to the source ranks.

        Each source's `sink` gets buckets of at most `bucket_bytes` (a larger tensor travels alone). Tensors may alias
        live parameters: the sink must be done with them, or have copied them, when it returns.
        """
        ...

    def shards(self) -> list[LocalShard]:
        """This rank's published parameters as boxes of HF tensors, for transfers that gather nothing. Not collective;
        the parameters' memory is the live one."""
        ...

    def check_copies(self) -> None:
        """RuntimeError if copies of a weight that are kept equal (tied embeddings between stages) came apart."""
        ...

    def begin_checkpoint(self, directory: str) -> PendingCheckpoint:
        """Copy out model, optimizer and schedule, to be written behind the next steps."""
        ...

    def save_checkpoint(self, directory: str) -> None:
        """Write model, optimizer and schedule; `directory` appears complete or not at all."""
        ...

    def load_checkpoint(self, directory: str) -> None:
        """Restore what `save_checkpoint` wrote, also under another TP x PP x DP layout."""
        ...

    def close(self) -> None:
        """Leave the process groups."""
        ...
