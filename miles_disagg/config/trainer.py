"""The trainer: ranks and parallelism, optimizer, loss. Flags are Megatron's and miles' own where they have them."""

from typing import Annotated, Literal

from miles_disagg.config.base import (
    Bounds,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)


class TrainerConfig(Section):
    """Trainer ranks and how the model is split over them."""

    actor_num_nodes: PositiveInt = 1
    """Nodes of the trainer."""
    actor_num_gpus_per_node: PositiveInt = 1
    """Trainer ranks per node: one GPU each, or --actor-cpus-per-rank cores each on CPU."""
    actor_cpus_per_rank: PositiveFloat = 1.0
    """CPU cores reserved for each trainer rank."""
    actor_gpu_fraction: Probability = 1.0
    """Share of its GPU that a trainer rank reserves; below 1 leaves room for an engine (--rollout-gpu-fraction)."""
    trainer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where GPUs exist, else cpu."""
    train_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of the model's weights and activations; the optimizer keeps fp32 masters."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Stages that the layers are divided into."""
    expert_model_parallel_size: PositiveInt = 1
    """Data parallel ranks that the experts of a layer are spread over."""
    use_distributed_optimizer: bool = False
    """Shard optimizer states over data parallel ranks."""
    global_batch_size: PositiveInt | None = None
    """Samples per optimizer step; unset: --rollout-batch-size x --n-samples-per-prompt."""
    max_tokens_per_gpu: PositiveInt = 8192
    """Tokens of a micro-batch per rank; samples are packed into micro-batches up to this."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass instead of keeping them."""
    seed: NonNegativeInt = 1234
    """Seed of the trainer."""
    colocate: bool = False
    """Refused: trainer and engines are separate systems here."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        """Number of model replicas in the trainer (rounded down where the sizes do not divide)."""
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)


class OptimizerConfig(Section):
    """Adam and its learning-rate schedule."""

    lr: PositiveFloat = 1e-6
    """Learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after warm-up."""
    lr_warmup_iters: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    lr_decay_iters: PositiveInt | None = None
    """Optimizer steps until --min-lr; unset: the whole run."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    adam_beta1: Fraction = 0.9
    """Adam's first decay rate."""
    adam_beta2: Fraction = 0.999
    """Adam's second decay rate."""
    adam_eps: PositiveFloat = 1e-8
    """Adam's denominator constant."""
    clip_grad: NonNegativeFloat = 1.0
    """Clip the global gradient norm to this; 0: off."""


class LossConfig(Section):
    """Advantages, the policy loss, and corrections for samples that another policy wrote. See docs/algorithms.md."""

    advantage_estimator: Literal["grpo", "gspo", "rloo", "reinforce_plus_plus_baseline", "ppo"] = "grpo"
    """How rewards become advantages; gspo is grpo with --policy-loss gspo, ppo is GAE with a critic."""
    custom_advantage_function_path: str | None = None
    """Import path of a function that makes the advantages, instead of --advantage-estimator. See docs/plugins.md."""
    normalize_advantages: bool = False
    """Advantages with mean 0 and standard deviation 1 over the tokens of a rollout batch."""
    disable_grpo_std_normalization: bool = False
    """Do not divide advantages by the group's standard deviation (Dr. GRPO)."""
    policy_loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Clipped ratio of each token, of each sequence (GSPO), or a clipped weight on REINFORCE (CISPO)."""
    custom_loss_function_path: str | None = None
    """Import path of a function that gives the policy loss of each token, instead of --policy-loss."""
    eps_clip: Fraction = 0.2
    """Lower clip range of the importance ratio."""
    eps_clip_high: PositiveFloat | None = None
    """Upper clip range; unset: --eps-clip."""
    eps_clip_c: Annotated[float, Bounds(low=1, open_low=True)] | None = None
    """Dual clip: bound of the ratio where the advantage is negative, for instance 3; unset: none."""
    use_rollout_logprobs: bool = False
    """Clip against the engine's logprobs instead of the trainer's own, recomputed before the first optimizer step."""
    use_kl_loss: bool = False
    """Add a KL term to the frozen base model."""
    kl_loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL term."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """KL estimator; low_var_kl is k3, clipped to [-10, 10]."""
    kl_reference: str | None = None
    """Server that scores the sampled tokens for the KL term, instead of a second copy of the base model in the trainer:
    the name of a frozen model of --sglang-config, or a URL."""
    kl_reference_timeout: PositiveFloat = 120.0
    """Seconds that the served reference may take for one sample."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    use_tis: bool = False
    """Weigh by the importance ratio of the trainer's logprobs to the engine's, within bounds."""
    tis_clip: PositiveFloat = 2.0
    """Upper bound of the importance weight."""
    tis_clip_low: NonNegativeFloat = 0.0
    """Lower bound of the importance weight, for --tis-mode clip and mask."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of a token, product over its sequence, or geometric mean over its sequence."""
    tis_mode: Literal["truncate", "clip", "mask"] = "truncate"
    """Outside the bounds: the upper bound (TIS), the nearest bound, or weight 0 (IcePop; MIS at the sequence level)."""
    use_rs: bool = False
    """Reject what has an importance ratio outside --rs-lower-bound and --rs-upper-bound."""
    rs_level: Literal["token", "sequence", "geometric"] = "token"
    """What is rejected: tokens, or sequences by product or geometric mean."""
    rs_lower_bound: NonNegativeFloat = 0.5
    """Smallest ratio that is kept."""
    rs_upper_bound: PositiveFloat = 2.0
    """Largest ratio that is kept."""
    rs_veto_threshold: PositiveFloat | None = None
    """Reject every sequence with a token whose ratio is below this, for instance 1e-4; unset: none."""
    calculate_per_token_loss: bool = False
    """Mean over tokens of the batch instead of the mean over samples of their token means."""
    loss_aggregation: Literal["token-mean", "sequence-mean", "constant"] | None = None
    """Says it in full; constant divides by --rollout-max-response-len (Dr. GRPO). Unset: by the flag above."""

    @property
    def objective(self) -> Literal["ppo", "gspo", "cispo"]:
        """The policy loss, with the estimator's short form applied."""
        return "gspo" if self.advantage_estimator == "gspo" else self.policy_loss

    @property
    def compares_samples(self) -> bool:
        """True if an advantage is a comparison with the other samples of the prompt, so that one alone has none."""
        return self.advantage_estimator != "ppo" and self.custom_advantage_function_path is None


class CriticConfig(Section):
    """PPO's critic, for --advantage-estimator ppo: a second model on the trainer's ranks."""

    gamma: Fraction = 1.0
    """Discount of later rewards in generalized advantage estimation."""
    lambd: Fraction = 1.0
    """Lambda of generalized advantage estimation: 1 is the return minus the value, 0 the one-step error."""
    value_clip: PositiveFloat = 0.2
    """How far a value may move from that of the rollout batch before its loss is clipped."""
    critic_lr: PositiveFloat | None = None
    """Learning rate of the critic; unset: --lr."""
    critic_lr_warmup_iters: NonNegativeInt = 0
    """Optimizer steps of the critic's linear warm-up."""
    num_critic_only_steps: NonNegativeInt = 0
    """First training steps that train the critic alone."""


class DistillationConfig(Section):
    """On-policy distillation: a teacher that is served elsewhere scores every sampled token."""

    use_opd: bool = False
    """Add the teacher's per-token advantage to the estimator's. See docs/algorithms.md."""
    opd_kl_coef: PositiveFloat = 1.0
    """Weight of the reverse KL to the teacher in the advantages."""
    opd_teacher_urls: tuple[str, ...] = ()
    """URL of the teacher's server, or NAME=URL for each of several; the name `default` serves the rest."""
    opd_teacher_key: str = "opd_teacher"
    """Key of a prompt's metadata that names its teacher."""
    opd_timeout: PositiveFloat = 120.0
    """Seconds that a teacher may take for one sample."""

    @property
    def teachers(self) -> list[tuple[str, str]]:
        """(name, URL) of every teacher; one without a name is `default`."""
        split = [entry.partition("=") for entry in self.opd_teacher_urls]
        named = [(name, url) if url and "/" not in name else ("default", name + eq + url) for name, eq, url in split]
        return [(name, url.rstrip("/").removesuffix("/generate")) for name, url in named]
