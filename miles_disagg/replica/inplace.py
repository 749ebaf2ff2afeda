"""In-place activation, the replica's side: `InPlaceLoader` stages a verified patch in the engine and commits it.

The engine has loaded `engine.inplace`'s plugin, which listens on a Unix socket per rank (so engine and replica share a
host). Whatever cannot be done in place is reloaded from the materialized checkpoint, and said. How the scatter works is
the plugin's; pausing is `activation`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from miles_disagg.domain.errors import EngineError, EngineUnavailable, UpdateFailed, WeightsNotLoaded
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.base import Engine
from miles_disagg.engine.inplace import HOOK
from miles_disagg.engine.tensors import serialize
from miles_disagg.replica.activation import ReloadLoader
from miles_disagg.replica.base import Materialized
from miles_disagg.weights.checkpoint import open_checkpoint
from miles_disagg.weights.digest import digest

log = logging.getLogger(__name__)
_PROBE_SAMPLES = 2048  # elements of each piece of a tensor that are compared with the checkpoint
_DENSE = 0.5  # a patch above this share of the checkpoint's bytes is reloaded
_LINE = 1 << 26


class InPlaceUnavailable(EngineError):
    """In-place activation cannot be used with this engine; the message says why."""


class Plugin:
    """The plugin's sessions on every rank of one engine. deadline: seconds for one answer."""

    def __init__(self, engine: Engine, *, deadline: float = 120.0):
        self._engine, self._deadline = engine, deadline
        self._directory: Path | None = None
        self._ranks = 1

    async def open(self, checkpoint: Path) -> dict[str, Any]:
        """Record the map from `checkpoint`'s names and shapes to the live weights; what was recorded, with the engine's
        `weight_version`. InPlaceUnavailable says why not, WeightsNotLoaded that the engine computes with weights that
        are nobody's.

        The engine must be idle or paused: the request waits for running ones.
        """
        info = await self.check()
        self._ranks = int(info.get("tp_size") or 1)
        self.close()
        self._directory = Path(tempfile.mkdtemp(prefix="miles-"))
        request = {"op": "open", "directory": str(self._directory), "checkpoint": str(checkpoint.absolute())}
        stamp = str(info.get("weight_version"))
        await self._hook(request, stamp)
        if not (self._directory / "rank-0.sock").exists():
            raise InPlaceUnavailable(
                f"the engine opened no session in {self._directory}: it runs on another host than its replica, or its "
                "log says why"
            )
        rows = await self.ask("status")
        unreached = [name for name in rows[0]["unreached"] if all(name in row["unreached"] for row in rows)]
        if unreached:  # on no rank: one of several may hold nothing but the padding of a small vocabulary
            raise WeightsNotLoaded(self._engine.url, unreached, str(checkpoint))
        return {**rows[0], "ranks": len(rows), "weight_version": stamp}

    async def check(self) -> dict[str, Any]:
        """The engine's `/server_info`, if a session can be opened in it; InPlaceUnavailable says why not."""
        info = await self._engine.server_info()
        loaders = info.get("custom_weight_loader") or []
        if HOOK not in loaders:
            raise InPlaceUnavailable(f"the engine was not started with --custom-weight-loader {HOOK}")
        for name, wanted in (("nnodes", 1), ("dp_size", 1), ("pp_size", 1), ("speculative_algorithm", None)):
            if info.get(name, wanted) != wanted:
                raise InPlaceUnavailable(f"the engine runs with {name} {info[name]}, which is not supported in place")
        return info

    async def commit(self, identity: str, version: str) -> float:
        """Put what was staged in place, stamp `version`; seconds of the slowest rank. EngineError if one failed."""
        await self._hook({"op": "commit", "id": identity}, version)
        slowest = 0.0
        for rank in range(self._ranks):
            result = self._result(identity, rank)
            if not result["ok"]:
                raise EngineError(f"weights could not be put in place on rank {rank}: {result['error']}")
            slowest = max(slowest, float(result["seconds"]))
        return slowest

    def _result(self, identity: str, rank: int) -> dict[str, Any]:
        """What the plugin wrote before the engine answered."""
        assert self._directory is not None
        try:
            path = self._directory / f"{identity}-{rank}.json"
            result = json.loads(path.read_text())
            path.unlink()
        except (OSError, ValueError) as error:
            return {"ok": False, "error": f"the plugin wrote no result ({error})"}
        return result

    async def call(self, op: str, **fields: Any) -> list[dict[str, Any]]:
        """`ask`, answered in the engines' schedulers: many times faster on a GPU, but nothing is served meanwhile. The
        engine must be idle or paused."""
        version = str((await self._engine.server_info()).get("weight_version"))
        identity = uuid.uuid4().hex
        await self._hook({"op": "call", "id": identity, "request": {"op": op, **fields}}, version)
        return self._good([self._result(identity, rank) for rank in range(self._ranks)])

    async def ask(self, op: str, **fields: Any) -> list[dict[str, Any]]:
        """Ask every rank's session; their answers. InPlaceUnavailable with the first error."""
        if self._directory is None:
            raise InPlaceUnavailable("no session is open")
        sockets = [self._directory / f"rank-{rank}.sock" for rank in range(self._ranks)]
        return self._good(await asyncio.gather(*(self._ask(path, {"op": op, **fields}) for path in sockets)))

    @staticmethod
    def _good(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for rank, answer in enumerate(answers):
            if not answer["ok"]:
                raise InPlaceUnavailable(f"rank {rank}: {answer['error']}")
        return answers

    @property
    def is_open(self) -> bool:
        """False before `open` and after `close`."""
        return self._directory is not None

    @property
    def directory(self) -> Path:
        """The open session's directory, for files that its ranks shall read. InPlaceUnavailable if none is open."""
        if self._directory is None:
            raise InPlaceUnavailable("no session is open")
        return self._directory

    async def digests(self, checkpoint: Path) -> dict[str, str]:
        """xxh3-128 of every tensor as it is served, by its name in `checkpoint`, whose names and shapes are used."""
        with open_checkpoint(checkpoint) as opened:
            infos, begins, total = dict(opened.tensors), {}, 0
            for name, info in infos.items():
                begins[name] = total
                total += -(-(info.end - info.begin) // 8) * 8
        with _scratch_file(max(1, total)) as file:
            answers = await self.ask("export", path=file.name, begins=begins)
            if converted := answers[0]["converted"]:
                raise InPlaceUnavailable(f"{len(converted)} tensors are served in another dtype, first {converted[0]}")
            return await asyncio.to_thread(_digests, Path(file.name), infos, begins)

    def close(self) -> None:
        """Forget the sessions."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _hook(self, request: Mapping[str, Any], version: str) -> None:
        raw = torch.tensor(list(json.dumps(request).encode()), dtype=torch.uint8)
        payload = serialize([("request", raw)])
        await self._engine.update_from_tensor(
            [payload] * self._ranks, load_format=HOOK, version=version, flush_cache=False
        )

    async def _ask(self, path: Path, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._deadline):
                reader, writer = await asyncio.open_unix_connection(str(path), limit=_LINE)
                try:
                    writer.write(json.dumps(request).encode() + b"\n")
                    await writer.drain()
                    line = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError:
            raise InPlaceUnavailable(f"{request['op']}: no answer within {self._deadline:g} s") from None
        except OSError as error:
            raise InPlaceUnavailable(f"{request['op']}: the engine's plugin does not answer ({error})") from None
        if not line:
            raise InPlaceUnavailable(f"{request['op']}: the engine closed the connection")
        return json.loads(line)


class InPlaceLoader:
    """`activation.Loader`: a patch that follows what the engine holds is scattered, anything else is reloaded.

    checkpoint: of any version, for names and shapes. verify_every: after so many scatters the fingerprint of all live
    weights is recomputed (before the pause) and must be the one that was tracked.
    """

    def __init__(self, engine: Engine, checkpoint: Path, *, verify_every: int = 32, deadline: float = 120.0):
        self.plugin = Plugin(engine, deadline=deadline)
        self._engine, self._checkpoint, self._verify_every = engine, checkpoint, verify_every
        self._holds: VersionRef | None = None
        self._staged: tuple[VersionRef, str] | None = None
        self._open = False
        self.scattered = 0
        self.scatter_seconds: float | None = None  # the last scatter, as the scheduler measured it
        self.reloaded: list[tuple[VersionRef, str]] = []  # with the reasons

    async def open(self, holds: VersionRef, checkpoint: Path | None = None) -> dict[str, Any]:
        """Record the map and check it against `checkpoint`, which the engine holds. InPlaceUnavailable says why not;
        WeightsNotLoaded as for `Plugin.open`."""
        checkpoint = checkpoint or self._checkpoint
        self._open, self._holds = False, None
        try:
            described = await self.plugin.open(checkpoint)
            for rank, answer in enumerate(
                await self.plugin.call("probe", directory=str(checkpoint), limit=_PROBE_SAMPLES)
            ):
                if answer["mismatch"]:
                    raise InPlaceUnavailable(f"rank {rank}: {answer['mismatch']} is not where its map says")
            await self.plugin.call("verify")
        except (InPlaceUnavailable, WeightsNotLoaded):
            raise
        except EngineError as error:
            raise InPlaceUnavailable(str(error)) from error
        self._open, self._holds = True, holds
        return described

    async def reopen(self, holds: VersionRef, checkpoint: Path | None) -> None:
        """`open` for an engine that was started anew; if it cannot be, versions are reloaded until one opens it."""
        try:
            await self.open(holds, checkpoint)
        except InPlaceUnavailable as error:
            log.warning("in-place activation is off until the next reload: %s", error)

    def engine_changed(self) -> None:
        """See `Loader`: no patch follows what the engine holds until a checkpoint was reloaded."""
        self._holds = None

    def describe(self) -> dict[str, Any]:
        """For a status page: how many versions were scattered, how many reloaded, and why the last one was."""
        last = f"{self.reloaded[-1][0]}: {self.reloaded[-1][1]}" if self.reloaded else None
        mode: Literal["in-place", "reload"] = "in-place" if self._open else "reload"
        return {
            "mode": mode,
            "in_place": self.scattered,
            "scatter_seconds": self.scatter_seconds,
            "reloads": len(self.reloaded),
            "last_reload": last,
        }

    async def stage(self, target: Materialized) -> None:
        """Map the patch and put it on the device, or find out why the checkpoint has to be reloaded."""
        self._staged = None
        reason = self._why_not(target)
        if reason is None:
            identity = uuid.uuid4().hex
            try:
                due = self._verify_every and self.scattered % self._verify_every == self._verify_every - 1
                if due and not all(answer["same"] for answer in await self.plugin.ask("verify")):
                    raise InPlaceUnavailable("the live weights' fingerprint is not the one tracked")
                await self.plugin.ask("stage", id=identity, patch=str(target.patch))
                self._staged = (target.ref, identity)
            except EngineError as error:
                reason = str(error)
        if reason is not None:
            log.warning("%s is reloaded, not activated in place: %s", target.ref, reason)
            self.reloaded.append((target.ref, reason))
            del self.reloaded[:-1000]

    async def _follow(self, target: Materialized) -> None:
        """After a reload, under the pause: the map still holds (a commit checks that nothing moved), so it is recorded
        anew only where the session is gone."""
        if self._open:
            try:
                await self.plugin.ask("discard")
                self._holds = target.ref
                return
            except InPlaceUnavailable:
                pass
        await self.reopen(target.ref, target.path)

    def _why_not(self, target: Materialized) -> str | None:
        if not self._open:
            return "no session is open in the engine"
        if target.patch is None or target.previous is None:
            return "it was built anew, there is no patch"
        if target.previous != self._holds:
            return f"its patch starts from {target.previous}, the engine holds {self._holds}"
        with contextlib.suppress(OSError):
            whole = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
            if target.patch.stat().st_size > _DENSE * whole:
                return "its patch is dense"
        return None

    async def load(self, engine: Engine, target: Materialized) -> None:
        """Scatter what was staged for `target`; failing that, reload its checkpoint."""
        staged, self._staged = self._staged, None
        self._holds, touched = None, False
        if staged is not None and staged[0] == target.ref:
            try:
                touched = True
                self.scatter_seconds = await self.plugin.commit(staged[1], str(target.ref))
                self._holds = target.ref
                self.scattered += 1
                return
            except EngineUnavailable:
                raise
            except EngineError as error:
                log.warning("%s: %s; reloading", target.ref, error)
                self.reloaded.append((target.ref, str(error)))
        try:
            await ReloadLoader().load(engine, target)
        except UpdateFailed as error:
            if touched:  # the refused reload changed nothing, but the scatter may have
                raise EngineError(f"after a failed scatter the checkpoint could not be reloaded: {error}") from error
            raise
        await self._follow(target)


def _scratch_file(nbytes: int) -> Any:
    """A temporary file that has its room already: an engine that wrote into one without would be killed."""
    for directory in ("/dev/shm", tempfile.gettempdir()):
        if not Path(directory).is_dir():
            continue
        file = tempfile.NamedTemporaryFile(prefix="miles-export-", dir=directory)  # noqa: SIM115 - given away
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return file
        except OSError:
            file.close()
    raise InPlaceUnavailable(f"no room for a copy of {nbytes:,} bytes in /dev/shm or {tempfile.gettempdir()}")


def _digests(path: Path, infos: Mapping[str, Any], begins: Mapping[str, int]) -> dict[str, str]:
    import numpy as np

    raw = np.memmap(path, np.uint8, "r")
    return {n: digest(raw[begins[n] : begins[n] + i.end - i.begin], "xxh3-128") for n, i in infos.items()}
