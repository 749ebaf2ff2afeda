"""The whole configuration of a run: every section, in one frozen model.

Sections are in `model`, `rollout`, `trainer`, `weights` and `cluster`; parsing in `flags`; derived values in
`resolve`; what is refused in `checks`. Nothing here imports torch or ray.
"""

from miles_disagg.config.base import Section
from miles_disagg.config.cluster import ClusterConfig, OutputConfig, TimeoutConfig
from miles_disagg.config.model import DataConfig, EvalConfig, ModelConfig, RewardConfig
from miles_disagg.config.rollout import EngineConfig, PacingConfig, RolloutConfig
from miles_disagg.config.trainer import LossConfig, OptimizerConfig, TrainerConfig
from miles_disagg.config.weights import WeightsConfig


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
    engines: EngineConfig = EngineConfig()
    pacing: PacingConfig = PacingConfig()
    trainer: TrainerConfig = TrainerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    output: OutputConfig = OutputConfig()

    @property
    def samples_per_step(self) -> int:
        """Samples that one training step consumes."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    def replace(self, **flags: object) -> "RunConfig":
        """A copy with some flags (by field name, whatever their section) changed and validated."""
        data = self.model_dump()
        owner = {field: name for name, section in data.items() for field in section}
        for field, value in flags.items():
            if field not in owner:
                raise KeyError(f"no flag is called {field!r}")
            data[owner[field]][field] = value
        return RunConfig.model_validate(data)
