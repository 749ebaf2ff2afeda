"""Rollout: sampling, engines and their topology, and how far generation may run ahead of training."""

from typing import Annotated, Literal

from pydantic import Field
from tyro.conf import Suppress

from miles_disagg.config.base import (
    Bounds,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)

Topology = Literal["managed", "attached", "service"]


class RolloutConfig(Section):
    """How samples are generated."""

    num_rollout: PositiveInt | None = None
    """Number of training steps; each consumes --rollout-batch-size groups."""
    rollout_batch_size: PositiveInt = 32
    """Prompts (groups) per training step."""
    n_samples_per_prompt: PositiveInt = 8
    """Completions per prompt; their rewards are compared with each other."""
    rollout_max_response_len: PositiveInt = 1024
    """Longest completion in tokens."""
    rollout_max_prompt_len: PositiveInt | None = None
    """Longest prompt in tokens; unset: what the context leaves. See --long-prompts."""
    rollout_temperature: PositiveFloat = 1.0
    """Sampling temperature; greedy samples cannot be trained on."""
    rollout_top_p: Probability = 1.0
    """Nucleus sampling threshold."""
    rollout_top_k: Annotated[int, Bounds(low=-1)] = -1
    """Sample among the k most likely tokens; -1: all."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion."""
    rollout_seed: int = 42
    """Seed of prompt order and sampling."""


class PluginConfig(Section):
    """What a run plugs in by import path `package.module.name`, besides --custom-rm-path. See docs/plugins.md."""

    custom_generate_function_path: str | None = None
    """Generate function: builds each sample in as many turns as it likes; unset: one turn."""
    data_source_path: str | None = None
    """Class of a prompt source, instead of reading --prompt-data."""
    dynamic_sampling_filter_path: str | None = None
    """Filter of scored groups: a reason to drop one, or nothing; dropped prompts are replaced by others."""
    custom_async_data_buffer_path: str | None = None
    """Class of the buffer between generation and training, called with its capacity in groups."""
    custom_rollout_log_function_path: str | None = None
    """Called after each step with what was trained on and what was logged."""
    custom_eval_rollout_log_function_path: str | None = None
    """Called after each evaluation with its step, version and metrics."""


class EngineConfig(Section):
    """Engines and their topology: managed (default), attached (external addresses) or service (one endpoint)."""

    rollout_engine: Literal["embedded", "sglang"] = "embedded"
    """Managed engines: the embedded torch engine, or stock SGLang servers."""
    rollout_num_gpus: NonNegativeInt = 0
    """GPUs for managed engines; 0: engines on CPU."""
    rollout_num_gpus_per_engine: PositiveInt = 1
    """GPUs of one managed engine, its tensor-parallel ranks; without --rollout-num-gpus, ranks on the CPU."""
    rollout_gpu_fraction: Probability = 1.0
    """Share of a GPU that a managed engine reserves; below 1 it shares one."""
    num_rollout_engines: PositiveInt | None = None
    """Managed engines on CPU; unset: 1. With GPUs it follows from the two flags above."""
    rollout_cpus_per_engine: PositiveFloat = 1.0
    """CPU cores reserved for each managed engine."""
    rollout_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Weights of managed engines, and what attached ones must have: auto is the checkpoint's dtype."""
    rollout_decode_interval: NonNegativeFloat = 0.0
    """Least seconds per decode step of an embedded engine: imitates a larger model in benchmarks."""
    sglang_python: str | None = None
    """Python of the virtual environment that SGLang runs from; unset: this one."""
    sglang_args: Annotated[dict[str, tuple[str, ...]], Suppress] = Field(default_factory=dict)
    """Server arguments by name without `--`, from `--sglang-NAME VALUE...`; an empty tuple is a bare switch."""
    sglang_config: str | None = None
    """YAML file of server groups: engines of several kinds, and frozen models (reference, reward) beside the policy."""
    rollout_external: bool = False
    """Attach to engines that somebody else runs, at --rollout-external-engine-addrs."""
    rollout_external_engine_addrs: tuple[str, ...] = ()
    """HOST:PORT of every attached engine."""
    sglang_router_ip: str | None = None
    """Host of an sglang-router that is already there in front of all attached engines; they are updated together."""
    sglang_router_port: Annotated[int, Bounds(low=1, high=65535)] | None = None
    """Its port."""
    rollout_endpoint: str | None = None
    """URL of an independent rollout service; needs --version-store."""
    rollout_auth_token_file: str | None = None
    """File with the bearer token of the rollout service, or with the API key of attached engines."""
    version_store: str | None = None
    """Store that a rollout service follows: a directory or an S3 prefix; needs --rollout-endpoint."""
    pause_generation_mode: Literal["in_place", "retract", "abort"] = "retract"
    """In-flight requests at a weight update: continue on the new weights, recompute their cache, or end."""

    @property
    def topology(self) -> Topology:
        """Who starts the engines."""
        if self.rollout_endpoint:
            return "service"
        return "attached" if self.rollout_external else "managed"

    @property
    def router_url(self) -> str | None:
        """The router in front of the attached engines, None without one."""
        if self.sglang_router_ip is None or self.sglang_router_port is None:
            return None
        host = f"[{self.sglang_router_ip}]" if ":" in self.sglang_router_ip else self.sglang_router_ip
        return f"http://{host}:{self.sglang_router_port}"

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The attached engines."""
        return tuple(f"http://{a.removeprefix('http://')}" for a in self.rollout_external_engine_addrs)

    @property
    def num_managed_engines(self) -> int:
        """Engines that this job starts; 0 in the attached and service topologies."""
        if self.topology != "managed":
            return 0
        if self.rollout_num_gpus:
            return self.rollout_num_gpus // self.rollout_num_gpus_per_engine
        return self.num_rollout_engines or 1

    def sglang_argv(self) -> list[str]:
        """The pass-through arguments as a server's command line."""
        return [part for name, values in self.sglang_args.items() for part in (f"--{name}", *values)]


class PacingConfig(Section):
    """How far generation runs ahead of training."""

    schedule: Literal["async", "sync"] = "async"
    """async: generation never waits for training; sync: generate a batch, train on it, update, repeat."""
    max_weight_staleness: NonNegativeInt | None = None
    """Largest lag (trainer's version minus oldest token's version) that is trained on; unset: no limit."""
    async_max_concurrent_samples: PositiveInt | None = None
    """Samples in flight; unset: one training batch."""
    rollout_submission_granularity: Literal["sample", "group"] = "group"
    """Start a group when all of its samples fit in flight, or sample by sample."""
    over_sampling_batch_size: PositiveInt | None = None
    """Groups started for a batch under --schedule sync; the first --rollout-batch-size that are kept are used."""
    partial_rollout: bool = False
    """An interrupted generation goes on later on its own tokens; under --schedule sync what over-sampling left."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Train only on the tokens that a sample's last version wrote."""
    async_data_buffer_capacity_factor: Annotated[float, Bounds(low=1)] = 2.0
    """Capacity of the buffer of finished groups, as a multiple of --rollout-batch-size."""
    async_unused_samples_handler: Literal["drop", "retry"] = "drop"
    """Stale or aborted groups: drop them, or generate their prompts again."""
    failed_samples_handler: Literal["refill", "shrink"] = "refill"
    """A sample that failed --sample-attempts times: generate its group again, or train on the group without it."""
    sample_attempts: PositiveInt = 3
    """Generations tried for one sample, each with its own timeout and reward."""
    prompt_attempts: PositiveInt = 3
    """Failed groups of one prompt before it is given up and listed in summary.json."""
    update_weights_interval: PositiveInt = 1
    """Publish weights every N steps."""
