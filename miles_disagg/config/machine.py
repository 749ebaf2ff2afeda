"""What this machine has: CPU cores, GPUs, free ports. Found without importing torch or ray."""

import os
import random
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from miles_disagg.domain.errors import PortTaken

T = TypeVar("T")
_PORTS_TRIED = 3


@dataclass(frozen=True)
class Machine:
    """Resources of one machine as this process may use them."""

    cpus: int
    gpus: int

    @classmethod
    def local(cls, environ: Mapping[str, str] = os.environ) -> "Machine":
        """This machine: cores by affinity and cgroup quota, GPUs by CUDA_VISIBLE_DEVICES or the driver."""
        return cls(cpus=_cpus(), gpus=_gpus(environ))


def port_problem(host: str, port: int) -> str | None:
    """Why a server cannot listen on `host:port`, or None. Port 0 always can."""
    if port == 0:
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nobody listens on now, for a server that will be started soon.

    Of no range from which others are given one unasked, since that may happen before the server listens: the kernel's
    for outgoing connections and port 0, and Ray's for its workers (10002 to 19999).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    low, high = _ephemeral()
    candidates = [*range(20_000, min(low, 32_768)), *range(high + 1, 65_536)]
    for port in random.SystemRandom().sample(candidates, min(200, len(candidates))):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


async def on_free_ports(start: Callable[[], Awaitable[T]], *, given: bool = False) -> T:
    """Result of `start`, which makes a server listen on a `free_port` and leaves nothing running when it raises.

    It is called again where it raises PortTaken: somebody else was faster. The third PortTaken is raised, and the
    first one where the port is `given`: another call would meet the same one.
    """
    for _ in range(0 if given else _PORTS_TRIED - 1):
        try:
            return await start()
        except PortTaken:
            continue
    return await start()


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 60_999


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
