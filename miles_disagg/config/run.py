"""The whole configuration of a run: every section, in one frozen model.

Sections are in `model`, `rollout`, `trainer`, `weights` and `cluster`; parsing in `flags`; derived values in
`resolve`; what is refused in `checks`. Nothing here imports torch or ray.
"""

from pathlib import Path
from typing import TypeVar

from miles_disagg.config.base import Section
from miles_disagg.config.cluster import ClusterConfig, OutputConfig, TimeoutConfig
from miles_disagg.config.model import (
    QUICKSTART,
    DataConfig,
    EvalConfig,
    ModelConfig,
    RewardConfig,
    quickstart_directory,
)
from miles_disagg.config.rollout import EngineConfig, PacingConfig, PluginConfig, RolloutConfig
from miles_disagg.config.trainer import (
    CriticConfig,
    DistillationConfig,
    LossConfig,
    OptimizerConfig,
    TrainerConfig,
)
from miles_disagg.config.weights import WeightsConfig

T = TypeVar("T")


class RunConfig(Section):
    """Train a policy with reinforcement learning; training and rollout inference are separate systems.

    Values come from flags, then from the YAML files given with --config FILE (the last one wins), then from the
    defaults shown here. Server arguments of SGLang pass through as --sglang-NAME VALUE.
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvalConfig = EvalConfig()
    rollout: RolloutConfig = RolloutConfig()
    plugins: PluginConfig = PluginConfig()
    engines: EngineConfig = EngineConfig()
    pacing: PacingConfig = PacingConfig()
    trainer: TrainerConfig = TrainerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()
    distillation: DistillationConfig = DistillationConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    output: OutputConfig = OutputConfig()

    # Values that `resolve` fills in, under their settled types.

    @property
    def run_id(self) -> str:
        """Name of the run and of its lineage."""
        return _settled(self.output.run_id, "--run-id")

    @property
    def run_dir(self) -> Path:
        """Absolute directory of the run."""
        return Path(_settled(self.output.run_dir, "--run-dir"))

    @property
    def checkpoint(self) -> Path:
        """Directory of the base checkpoint, version 0."""
        given = _settled(self.model.hf_checkpoint, "--hf-checkpoint")
        return quickstart_directory() if given == QUICKSTART else Path(given).expanduser()

    @property
    def num_rollout(self) -> int:
        """Number of training steps."""
        return _settled(self.rollout.num_rollout, "--num-rollout")

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return _settled(self.trainer.global_batch_size, "--global-batch-size")

    @property
    def max_concurrent_samples(self) -> int:
        """Samples in flight at most."""
        return _settled(self.pacing.async_max_concurrent_samples, "--async-max-concurrent-samples")

    @property
    def buffer_capacity(self) -> int:
        """Finished groups that the data buffer holds at most."""
        return int(self.pacing.async_data_buffer_capacity_factor * self.rollout.rollout_batch_size)

    @property
    def version_store(self) -> str:
        """Root of the version store: an absolute directory or an S3 prefix."""
        return _settled(self.weights.update_weight_disk_dir, "--update-weight-disk-dir")

    @property
    def local_checkpoint_dir(self) -> Path:
        """Directory for materialized checkpoints on a rollout host."""
        return Path(_settled(self.weights.update_weight_local_checkpoint_dir, "--update-weight-local-checkpoint-dir"))

    @property
    def num_eval_replicas(self) -> int:
        """Engines that evaluate and do nothing else; 0: the rollout engines evaluate too."""
        if self.evaluation.eval_num_gpus:
            return self.evaluation.eval_num_gpus // self.engines.rollout_num_gpus_per_engine
        return self.evaluation.eval_num_replicas or 0

    @property
    def samples_per_step(self) -> int:
        """Samples that one training step consumes."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def uses_critic(self) -> bool:
        """True if a critic is trained beside the policy."""
        return self.loss.advantage_estimator == "ppo"

    def replace(self, **flags: object) -> "RunConfig":
        """A copy with some flags (by field name, whatever their section) changed and validated."""
        data = self.model_dump()
        owner = {field: name for name, section in data.items() for field in section}
        for field, value in flags.items():
            if field not in owner:
                raise KeyError(f"no flag is called {field!r}")
            data[owner[field]][field] = value
        return RunConfig.model_validate(data)


def _settled(value: T | None, flag: str) -> T:
    if value is None:
        raise ValueError(f"{flag} has no value: the configuration was not resolved, or not checked")
    return value
