"""`miles-disagg doctor`: looks at a deployment before a run. Every line says what was found and what to do.

Nothing is started and nothing is kept. What is looked at beside the configuration: the engines' or the service's
addresses (`_attached`, `_service`), the publication path from both sides, disk and memory. What cannot be seen from
here is said to be so, not passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_disagg.cluster.reach import WAIT_SECONDS, endpoint_lines, meets, port_open, router_lines
from miles_disagg.cluster.specs import wanted
from miles_disagg.config.flags import parse_run
from miles_disagg.config.machine import Machine
from miles_disagg.config.resolve import is_url, joins_cluster, resolve
from miles_disagg.config.run import RunConfig
from miles_disagg.config.secrets import read_token
from miles_disagg.domain.errors import EngineError, EngineUnavailable, MilesDisaggError, UpdateFailed
from miles_disagg.engine.discovery import (
    TESTED_SGLANG,
    Discovered,
    ModelFacts,
    differences,
    discover,
    group_differences,
)
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.store.base import open_store
from miles_disagg.weights.checkpoint import open_checkpoint

PROBE_GROUP = "--probe-group"
_NONCE = ".doctor-"
_GB = 1e9


@dataclass(frozen=True)
class Line:
    """One finding. bad: the run would fail, `detail` says what to do; unknown: it cannot be seen from here."""

    verdict: Literal["ok", "bad", "unknown"]
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.verdict:<8}{self.what}: {self.detail}"


def main(argv: Sequence[str]) -> int:
    """Print a line for everything looked at; 1 if a run would fail."""
    argv = list(argv)
    probe = PROBE_GROUP in argv
    config = parse_run([a for a in argv if a != PROBE_GROUP], prog="miles-disagg doctor")
    lines = asyncio.run(_print(examine(config, probe_group=probe)))
    bad, unknown = (sum(line.verdict == v for line in lines) for v in ("bad", "unknown"))
    print(f"{len(lines)} lines: {bad} bad, {unknown} not checkable from here")
    return int(bad > 0)


async def _print(lines: AsyncIterator[Line]) -> list[Line]:
    seen = []
    async for line in lines:
        print(line, flush=True)
        seen.append(line)
    return seen


async def examine(config: RunConfig, *, probe_group: bool = False) -> AsyncIterator[Line]:
    """Findings in order. probe_group: also let engines on other hosts try to join a process group with this one."""
    from miles_disagg.cluster.preflight import preflight

    machine = None if joins_cluster(config) else Machine.local()
    problems = await asyncio.to_thread(preflight, config, machine)
    for problem in problems:
        yield Line("bad", "configuration", problem)
    if problems:
        yield Line("unknown", "the deployment", "looked at once the configuration is sound")
        return
    yield Line("ok", "configuration", "sound, and so are the files it names")
    config = resolve(config, machine.gpus if machine else None)
    with open_checkpoint(config.checkpoint) as checkpoint:
        size = sum(info.end - info.begin for info in checkpoint.tensors.values())
    for line in _room(config, size):
        yield line
    if config.cluster.ray_address not in (None, "local", "auto"):
        yield await _ray(str(config.cluster.ray_address))
    if config.weights.transport == "disk":
        yield await asyncio.to_thread(_store, config)
    rollout = {"attached": _attached, "service": _service, "managed": _managed}[config.engines.topology]
    async for line in rollout(config, probe_group):
        yield line


# --- this host -------------------------------------------------------------------------------------


def _room(config: RunConfig, size: int) -> Iterator[Line]:
    """Free disk where checkpoints are materialized and published, free memory for the trainer's copy."""
    if config.weights.transport == "disk":
        engines = len(config.engines.rollout_external_engine_addrs) or config.engines.num_managed_engines
        engines += config.num_eval_replicas
        needs = {config.local_checkpoint_dir: engines * size, config.run_dir: 0}
        if not is_url(config.version_store):
            versions = 1 if config.weights.mode == "delta" else 3
            needs[Path(config.version_store)] = versions * size
        by_device: dict[int, tuple[Path, int]] = {}
        for path, need in needs.items():
            there = _existing(path)
            _, before = by_device.get(there.stat().st_dev, (there, 0))
            by_device[there.stat().st_dev] = (there, before + need)
        for there, need in by_device.values():
            free = shutil.disk_usage(there).free
            text = f"{free / _GB:.1f} GB free, {need / _GB:.3g} GB wanted for {size / _GB:.3g} GB of weights"
            remedy = "; free some, or move --update-weight-disk-dir or --update-weight-local-checkpoint-dir"
            yield Line("ok" if free >= need else "bad", f"disk at {there}", text + (remedy if free < need else ""))
    available = _memory()
    if available is None:
        yield Line("unknown", "memory", "this system does not say how much is free")
        return
    text = f"{available / _GB:.1f} GB free, {size / _GB:.3g} GB of weights"
    enough = available >= 2 * size  # the model and the copy that is published from
    yield Line("ok" if enough else "bad", "memory", text + ("" if enough else "; a run keeps two copies: free some"))


def _memory() -> int | None:
    """Bytes that this host can give."""
    with contextlib.suppress(OSError, ValueError):
        for row in Path("/proc/meminfo").read_text().splitlines():
            if row.startswith("MemAvailable:"):
                return int(row.split()[1]) * 1024
    return None


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


async def _ray(address: str) -> Line:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if await port_open(host, int(port)):
        return Line("ok", f"Ray at {address}", "reachable; its resources are asked for at the start")
    return Line("bad", f"Ray at {address}", "does not answer: start it, or correct --ray-address")


def _store(config: RunConfig) -> Line:
    """The publication path from this side: a nonce is written, read back and removed."""
    url = config.version_store
    scratch = None
    if not is_url(url):
        url = str(_existing(Path(url)))
        scratch = Path(url) / f"{_NONCE}{secrets.token_hex(8)}"
    key, nonce = f"_probes/doctor-{secrets.token_hex(8)}", secrets.token_hex(16).encode()
    try:
        store = open_store(str(scratch or url))
        store.put(key, nonce)
        try:
            same = store.get(key) == nonce
        finally:
            store.delete(key)
    except (MilesDisaggError, OSError) as error:
        return Line("bad", f"publication path {url}", f"cannot be written and read: {error}")
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    if not same:
        return Line("bad", f"publication path {url}", "gives back other bytes than were written: not a usable store")
    return Line("ok", f"publication path {url}", "written and read back here")


# --- topologies ------------------------------------------------------------------------------------


async def _managed(config: RunConfig, probe_group: bool) -> AsyncIterator[Line]:
    engines = config.engines
    if engines.rollout_engine == "sglang":
        python = engines.sglang_python or "python"
        found = await asyncio.to_thread(_sglang_version, engines.sglang_python)
        if found is None:
            yield Line("bad", f"SGLang of {python}", "cannot be imported: install it there, or give --sglang-python")
        else:
            note = "" if found == TESTED_SGLANG else f"; tested with {TESTED_SGLANG}"
            yield Line("ok", f"SGLang of {python}", found + note)
    if joins_cluster(config):
        yield Line(
            "unknown", "paths on the cluster's other nodes",
            "engines are placed by Ray at the start; checkpoint, run directory and publication path must be on a file "
            "system that all nodes share",
        )  # fmt: skip
    elif config.weights.transport == "broadcast":
        yield Line("ok", "process group", "trainer and engines are on this host")


def _sglang_version(python: str | None) -> str | None:
    import subprocess
    import sys

    script = "from importlib.metadata import version; import sglang; print(version('sglang'))"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([python or sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


async def _service(config: RunConfig, probe_group: bool) -> AsyncIterator[Line]:
    engines = config.engines
    token = read_token(engines.rollout_auth_token_file, "--rollout-auth-token-file")
    newest = None
    with contextlib.suppress(MilesDisaggError, OSError):
        from miles_disagg.store.versions import VersionStore

        newest = await asyncio.to_thread(VersionStore(open_store(config.version_store)).latest)
    async for verdict, what, detail in endpoint_lines(str(engines.rollout_endpoint), token, newest):
        yield Line(verdict, what, detail)


async def _attached(config: RunConfig, probe_group: bool) -> AsyncIterator[Line]:
    token = read_token(config.engines.rollout_auth_token_file, "--rollout-auth-token-file")
    model = ModelFacts.read(config.checkpoint)
    engines, seen = config.engines, list[Discovered]()
    if engines.router_url is not None:
        async for verdict, what, detail in router_lines(engines.router_url, token, engines.engine_urls):
            yield Line(verdict, what, detail)
    for i, (address, url) in enumerate(zip(engines.rollout_external_engine_addrs, engines.engine_urls, strict=True)):
        engine = SGLangEngine(url, token, control_timeout=WAIT_SECONDS)
        try:
            async for line in _engine(config, model, engine, f"engine-{i} at {address}", probe_group, seen):
                yield line
        finally:
            await engine.close()
    for problem in group_differences(seen) if engines.router_url is not None else ():
        yield Line("bad", f"the engines behind {engines.router_url}", problem)


async def _engine(
    config: RunConfig,
    model: ModelFacts,
    engine: SGLangEngine,
    name: str,
    probe_group: bool,
    seen: list[Discovered],
) -> AsyncIterator[Line]:
    """One attached engine: there (what it is goes to `seen`), let in, fitting; then how weights will reach it."""
    try:
        found = await discover(engine)
        seen.append(found)
    except EngineUnavailable as error:
        yield Line("bad", name, f"{error}; start it, or correct --rollout-external-engine-addrs")
        return
    except EngineError as error:
        remedy = "give its API key with --rollout-auth-token-file FILE" if error.status in (401, 403) else "look there"
        yield Line("bad", name, f"refuses: {error} ({error.status}); {remedy}")
        return
    note = "" if found.embedded or found.version == TESTED_SGLANG else f"; tested with SGLang {TESTED_SGLANG}"
    yield Line("ok", name, found.describe() + note)
    problems = differences(found, wanted(config, model), routed=config.engines.router_url is not None)
    for problem in problems:
        yield Line("bad", name, problem)
    if problems:
        return
    if config.weights.transport == "disk":
        yield await _same_path(config, engine, found, name)
    else:
        yield await _group(config, engine, found, name, probe_group)


async def _same_path(config: RunConfig, engine: SGLangEngine, found: Discovered, name: str) -> Line:
    """Whether the engine's host sees what this one writes: it is asked to load an empty directory with a random name.

    No engine can load that. One that sees the directory misses the weights in it; one that does not, the directory.
    """
    root = _existing(config.local_checkpoint_dir)
    nonce = root / f"{_NONCE}{secrets.token_hex(16)}"
    what = f"{name}: checkpoints in {root}"
    nonce.mkdir()
    try:
        await engine.update_from_disk(str(nonce), found.weight_version, flush_cache=False)
        return Line("bad", what, "it says that it loaded an empty directory: its answers cannot be trusted")
    except UpdateFailed as error:
        return _verdict(what, str(error))
    except EngineError as error:
        return Line("unknown", what, f"it does not say whether it sees them ({error}); is it busy?")
    finally:
        nonce.rmdir()


def _verdict(what: str, said: str) -> Line:
    if any(text in said for text in ("Cannot find any model weights", "neither model.safetensors")):
        return Line("ok", what, "written here, seen there")
    if any(text in said for text in ("Repo id must be", "no such directory")):
        return Line(
            "bad", what,
            "written here, not seen there: put --update-weight-local-checkpoint-dir on a file system that both mount "
            "at the same path, or use broadcast, or run `miles-disagg replica` on the engine's host",
        )  # fmt: skip
    return Line("unknown", what, f"its answer does not tell: {said}")


async def _group(config: RunConfig, engine: SGLangEngine, found: Discovered, name: str, probe_group: bool) -> Line:
    """Whether engine and trainer can form a process group, tried with this process in the trainer's place."""
    what = f"{name}: process group"
    local = any(host in engine.url for host in ("//127.", "//localhost", "//[::1]"))
    if not local and not probe_group:
        return Line(
            "unknown", what,
            f"not tried, since an engine that cannot reach this host is busy until its own time-out (SGLang: 30 "
            f"minutes); {PROBE_GROUP} tries it from here, where the trainer must run for it to count",
        )  # fmt: skip
    try:
        seconds = await meets(engine, found.ranks)
    except MilesDisaggError as error:
        remedy = "open the ports between the hosts, or use --update-weight-transfer-mode disk-delta"
        return Line("bad", what, f"{error}; {remedy}")
    return Line("ok", what, f"{found.ranks} rank(s) joined over gloo in {seconds:.1f} s, and left")
