"""Where the run lives: Ray, network addresses, deadlines, directories and trackers."""

from typing import Literal

from miles_disagg.config.base import Port, PositiveFloat, PositiveInt, Seconds, Section


class ClusterConfig(Section):
    """Ray and network addresses."""

    ray_address: str | None = None
    """Running Ray cluster to join (`auto` or HOST:PORT); unset: RAY_ADDRESS, else a cluster of its own."""
    ray_dashboard: bool = False
    """Start Ray's dashboard with a cluster of its own (10 to 20 s more); a joined cluster has one already."""
    num_gpus_per_node: PositiveInt = 8
    """GPUs of a rollout node; a larger engine spans several nodes."""
    actor_node_resource: str | None = None
    """Custom Ray resource that marks trainer nodes; unset: any node."""
    rollout_node_resource: str | None = None
    """Custom Ray resource that marks rollout nodes; unset: any node."""
    gateway_host: str = "127.0.0.1"
    """Address that the gateway and the replicas listen on."""
    gateway_port: Port = 0
    """Port of the gateway; 0: any free port."""


class TimeoutConfig(Section):
    """Deadlines in seconds. Nothing waits for ever."""

    placement_timeout: Seconds = 120.0
    """For Ray to place the trainer and the engines."""
    engine_start_timeout: Seconds = 300.0
    """For an engine to answer its first health check."""
    trainer_start_timeout: Seconds = 300.0
    """For all trainer ranks to have loaded the model."""
    rollout_request_timeout: Seconds = 600.0
    """For one completion."""
    rollout_wait_timeout: Seconds = 1800.0
    """For the trainer to get its next batch."""
    reward_timeout: Seconds = 30.0
    """For one reward."""
    train_step_timeout: Seconds = 1800.0
    """For one optimizer step."""
    update_weights_timeout: Seconds = 600.0
    """For one version to be published and activated."""
    save_timeout: Seconds = 3600.0
    """For one checkpoint to be written and verified, behind the steps."""
    distributed_timeout_minutes: PositiveFloat = 10.0
    """For one collective of the trainer, in minutes."""
    shutdown_timeout: Seconds = 30.0
    """For the run to end in order before its processes are killed."""


class OutputConfig(Section):
    """What the run is called and what it leaves behind."""

    run_dir: str | None = None
    """Directory of what the run leaves behind; unset: runs/RUN_ID, for a Ray job ~/miles-disagg-runs/RUN_ID."""
    run_id: str | None = None
    """Name of the run and of its versions' lineage; unset: made from the time."""
    dry_run: bool = False
    """Check everything, print all problems and the placement, start nothing."""
    use_tensorboard: bool = True
    """Write TensorBoard files to RUN_DIR/tensorboard."""
    use_wandb: bool = False
    """Log to Weights & Biases (offline without a key)."""
    save_interval: PositiveInt | None = None
    """Save a checkpoint to RUN_DIR/checkpoints every N steps and after the last one; unset: never."""
    save_total_limit: PositiveInt | None = None
    """Keep this many checkpoints, the newest ones; unset: all."""
    async_save: bool = True
    """Write checkpoints behind the next steps, which wait only while the state is copied out to host memory."""
    save_on_interrupt: bool = False
    """At Ctrl-C or SIGTERM, finish the step, save a checkpoint and end; a second signal ends at once."""
    load: str | None = None
    """Run directory to continue from its newest checkpoint; its config.yaml lies below all other flags and files."""
    resume: Literal["never", "auto"] = "never"
    """auto: continue the run in --run-dir if there is one, else start it."""
