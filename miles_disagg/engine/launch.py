"""Starting an engine server as a process: the command and environment of each kind, readiness, logs, and the end.

A server runs in a process group of its own under `guard`, so nothing of it outlives its owner. Restarting, and
bringing a restarted engine to the current version, is the owner's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from miles_disagg.config.machine import free_port, on_free_ports
from miles_disagg.domain.errors import ConfigError, DeadlineExceeded, EngineStartError, PortTaken
from miles_disagg.engine import guard
from miles_disagg.engine.inplace import HOOK, PLUGIN_PATH

LOG_LINES = 50
_POLL_SECONDS = 0.2
_STOP_SECONDS = 15.0
_PORT_TAKEN = "address already in use"

# The scheduler answers without these on a CPU; the reasons are in docs/engines.md.
_SGLANG_CPU_FLAGS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    *("--max-total-tokens", "20000"),
    *("--max-running-requests", "16"),
)


@dataclass(frozen=True)
class LaunchSpec:
    """What to run. `args` are appended, so they win over what is set here (argparse takes the last)."""

    command: tuple[str, ...]
    host: str
    port: int
    model_path: str
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    api_key: str | None = None

    @property
    def url(self) -> str:
        """Where it will answer."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class NodeRank:
    """Place of one process in an SGLang engine that spans `count` nodes. meet: HOST:PORT on the first one's node, which
    all reach."""

    rank: int
    count: int
    meet: str

    @property
    def args(self) -> tuple[str, ...]:
        """As a server's arguments."""
        return ("--nnodes", str(self.count), "--node-rank", str(self.rank), "--dist-init-addr", self.meet)


def embedded(
    model_path: str | Path,
    *,
    port: int,
    host: str = "127.0.0.1",
    device: str = "cpu",
    weight_version: str = "default",
    api_key: str | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """The embedded engine in this interpreter.

    A chunk every 8 tokens: a version change always ends a chunk, so token spans stay exact at a fraction of the cost.
    """
    command = [sys.executable, "-m", "miles_disagg.engine.embedded", "--model-path", str(model_path)]
    command += ["--host", host, "--port", str(port), "--device", device, "--weight-version", weight_version]
    command += ["--stream-interval", "8"]
    if api_key:
        command += ["--api-key", api_key]
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **(env or {})}
    return LaunchSpec((*command, *args), host, port, str(model_path), environment, (), api_key)


def cores_of_ranks(ranks: int, cores: Sequence[int]) -> str:
    """`cores` dealt out to the ranks of an engine on a CPU, as SGLang takes them: `0,2|1,3`. With fewer cores than
    ranks, some share one."""
    dealt = [cores[rank::ranks] or (cores[rank % len(cores)],) for rank in range(ranks)]
    return "|".join(",".join(map(str, own)) for own in dealt)


def sglang(
    model_path: str | Path,
    *,
    port: int,
    host: str = "127.0.0.1",
    device: str = "cuda",
    python: str | Path | None = None,
    weight_version: str = "default",
    api_key: str | None = None,
    ranks: int = 1,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """A stock SGLang server of `ranks` tensor-parallel ranks, run by `python` (`--sglang-python`; None: this one).

    Another interpreter does not see this one's PYTHONPATH; what it shall see goes into `env`. Every server can load
    `engine.inplace`'s plugin; whether it is used is `replica.inplace`'s.
    """
    if python is not None and not os.access(python, os.X_OK):
        raise ConfigError(
            [f"--sglang-python {python} is not an executable file: give the python of SGLang's environment"]
        )
    command = [str(python or sys.executable), "-m", "sglang.launch_server", "--model-path", str(model_path)]
    command += ["--host", host, "--port", str(port), "--weight-version", weight_version]
    # /health answers at once, also while paused; otherwise it generates a token and turns 503 under a pause
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "TOKENIZERS_PARALLELISM": "false"}
    if ranks > 1:
        command += ["--tp-size", str(ranks)]
    if device == "cpu":
        command += _SGLANG_CPU_FLAGS
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if ranks > 1:  # else it wants a NUMA node for each rank
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = os.environ.get(
                "SGLANG_CPU_OMP_THREADS_BIND"
            ) or cores_of_ranks(ranks, sorted(os.sched_getaffinity(0)))
    else:
        command += ["--device", device.partition(":")[0]]
        environment |= {"NCCL_CUMEM_ENABLE": "0"}
    command += ["--incremental-streaming-output"]  # a chunk grows with what is new, not with the whole answer
    command += ["--sleep-on-idle"]  # an idle scheduler polls otherwise, and the plugin's thread waits long for a turn
    if api_key:
        command += ["--api-key", api_key]
    unset = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") if python is not None else ()
    command += ["--custom-weight-loader", HOOK]
    inherited = os.environ.get("PYTHONPATH") if python is None else None
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PLUGIN_PATH), inherited)))
    return LaunchSpec((*command, *args), host, port, str(model_path), {**environment, **(env or {})}, unset, api_key)


class EngineProcess:
    """A running server. Build it with `start`; its output goes to `log_path` (appended)."""

    def __init__(self, spec: LaunchSpec, process: subprocess.Popen[bytes], log_path: Path, log_start: int):
        self.spec, self.log_path = spec, log_path
        self._process = process
        self._log_start = log_start
        self._started = time.monotonic()

    @classmethod
    def start(cls, spec: LaunchSpec, log_path: str | Path) -> EngineProcess:
        """Start and return at once; `wait_ready` follows."""
        log_path = Path(log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        env = {k: v for k, v in os.environ.items() if k not in spec.unset}
        env.update(spec.env)
        command = [sys.executable, "-I", "-S", guard.__file__, "--parent", str(os.getpid()), "--", *spec.command]
        with open(log_path, "ab") as log:
            start = log.tell()
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(spec, process, log_path, start)

    @property
    def url(self) -> str:
        """Where it answers."""
        return self.spec.url

    @property
    def pid(self) -> int:
        """Process group (and id of the guard)."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """The last lines this process wrote."""
        with open(self.log_path, "rb") as log:
            log.seek(self._log_start)
            return b"".join(deque(log, maxlen=lines)).decode(errors="replace")

    def port_taken(self) -> str | None:
        """The last lines it wrote if they say that a port was in use (SGLang does not end then), else None."""
        tail = self.log_tail()
        return f"Last lines of {self.log_path}:\n{tail}" if _PORT_TAKEN in tail.lower() else None

    @classmethod
    async def started(
        cls, spec_for: Callable[[int], LaunchSpec], log_path: str | Path, *, host: str, port: int, timeout: float
    ) -> EngineProcess:
        """Start and wait until it is ready, on `port`, or, where that is 0, on a free one; another one if somebody was
        faster. Errors as of `wait_ready`; nothing is left running then."""

        async def start() -> EngineProcess:
            process = cls.start(spec_for(port or free_port(host)), log_path)
            try:
                await process.wait_ready(timeout)
            except BaseException:
                await process.stop()
                raise
            return process

        return await on_free_ports(start, given=port != 0)

    async def wait_ready(self, timeout: float) -> None:
        """Return once it answers as itself. EngineStartError if it ends (PortTaken: somebody else got its port first),
        DeadlineExceeded after `timeout` seconds from start; all carry the last lines of the log."""
        headers = {"Authorization": f"Bearer {self.spec.api_key}"} if self.spec.api_key else {}
        seen = "nothing listens there yet"
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as session:
            while True:
                tail = f"Last lines of {self.log_path}:\n{self.log_tail()}"
                if _PORT_TAKEN in tail.lower():  # SGLang does not end then
                    raise PortTaken(f"a port of the engine at {self.url} is in use by another process. {tail}")
                if (code := self.exit_code) is not None:
                    raise EngineStartError(f"engine at {self.url} ended with status {code} before it was ready. {tail}")
                try:
                    async with session.get(f"{self.url}/health") as response:
                        seen = f"/health answers {response.status}"
                        if response.status == 200 and await self._is_ours(session):
                            return
                except (aiohttp.ClientError, TimeoutError, OSError) as e:
                    seen = f"{type(e).__name__}: {e}"
                waited = time.monotonic() - self._started
                if waited > timeout:
                    raise DeadlineExceeded(f"the engine at {self.url} to become ready", waited, f"{seen}. {tail}")
                await asyncio.sleep(_POLL_SECONDS)

    async def _is_ours(self, session: aiohttp.ClientSession) -> bool:
        """False if somebody else's server has the port (ours is about to fail on it)."""
        async with session.get(f"{self.url}/model_info") as response:
            return response.status == 200 and (await response.json()).get("model_path") == self.spec.model_path

    def kill(self) -> None:
        """SIGKILL the whole group, now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> int | None:
        """Ask it to end, kill it after a grace period; returns its exit status. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return await asyncio.to_thread(self._process.wait)
        finally:
            self.kill()
