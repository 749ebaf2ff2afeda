"""Fill in what follows from other values, so that the saved configuration says everything.

Also the few facts about this machine that decide a default: its CPU cores and GPUs, found without torch or ray.
"""

import os
import secrets
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_disagg.config.run import RunConfig


@dataclass(frozen=True)
class Machine:
    """Resources of one machine as this process may use them."""

    cpus: int
    gpus: int

    @classmethod
    def local(cls, environ: Mapping[str, str] = os.environ) -> "Machine":
        """This machine: cores by affinity and cgroup quota, GPUs by CUDA_VISIBLE_DEVICES or the driver."""
        return cls(cpus=_cpus(), gpus=_gpus(environ))


def resolve(config: RunConfig, gpus: int | None = None) -> RunConfig:
    """A configuration with every derived value filled in; resolving twice changes nothing.

    gpus: GPUs in reach (of this machine, or of the Ray cluster); None: unknown, `--trainer-device auto` stays.
    """
    run_id = config.output.run_id or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    run_dir = Path(config.output.run_dir or Path("runs") / run_id).expanduser().absolute()
    flags: dict[str, object] = {
        "run_id": run_id,
        "run_dir": str(run_dir),
        "global_batch_size": config.trainer.global_batch_size or config.samples_per_step,
        "async_max_concurrent_samples": config.pacing.async_max_concurrent_samples or config.samples_per_step,
        "eps_clip_high": config.loss.eps_clip_high or config.loss.eps_clip,
        "update_weight_mode": config.weights.mode,
        "update_weight_transport": config.weights.transport,
        "update_weight_encoding": config.weights.encoding,
        "update_weight_disk_dir": _store_root(config, run_dir),
        "update_weight_local_checkpoint_dir": _absolute(
            config.weights.update_weight_local_checkpoint_dir or str(run_dir / "replicas")
        ),
        "eval_max_response_len": config.evaluation.eval_max_response_len or config.rollout.rollout_max_response_len,
        "wandb_group": config.output.wandb_group or run_id,
        "lr_decay_iters": config.optimizer.lr_decay_iters or config.rollout.num_rollout,
    }
    if config.engines.topology == "managed":
        flags["num_rollout_engines"] = config.engines.num_managed_engines or None
    if config.trainer.trainer_device == "auto" and gpus is not None:
        flags["trainer_device"] = "cuda" if gpus else "cpu"
    return config.replace(**flags)


def joins_cluster(config: RunConfig, environ: Mapping[str, str] = os.environ) -> bool:
    """True if the run joins a Ray cluster that is already running, whose resources only Ray knows."""
    return config.cluster.ray_address not in (None, "local") or (
        config.cluster.ray_address is None and bool(environ.get("RAY_ADDRESS"))
    )


def is_url(place: str) -> bool:
    """True for an object-store address such as s3://bucket/prefix."""
    return "://" in place


def _store_root(config: RunConfig, run_dir: Path) -> str:
    return _absolute(config.engines.version_store or config.weights.update_weight_disk_dir or str(run_dir / "weights"))


def _absolute(place: str) -> str:
    return place if is_url(place) else str(Path(place).expanduser().absolute())


def _cpus() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def _gpus(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() not in ("-1", "NoDevFiles")])
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        pass
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
