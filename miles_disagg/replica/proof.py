"""Proof of what is served: the engine's own tensors, digested, against the checksums that were published.

`ProvenStager` notes the published checksums of what was materialized; `Prover` asks the engine for the digests of the
tensors it computes with, after every activation and from time to time. A replica whose weights are not what was
published is fenced and loads them again. Needs an engine that answers `/weights_digest` (the embedded one) or has our
plugin loaded (SGLang), and serves the checkpoint's own dtype; elsewhere there is no fingerprint, and it says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_disagg.domain.errors import EngineError, MilesDisaggError
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.base import Materialized, Stager
from miles_disagg.replica.replica import Replica
from miles_disagg.weights.chain import patch_names
from miles_disagg.weights.checkpoint import open_checkpoint, tensor_digests
from miles_disagg.weights.digest import digest
from miles_disagg.weights.dtypes import OF_TORCH
from miles_disagg.weights.safetensors_file import read_header

log = logging.getLogger(__name__)
_KEPT = 2
_REST = 20.0


class CannotLook(MilesDisaggError):
    """Nothing can be said about this engine's live weights; the message says why."""


@dataclass(frozen=True)
class Fingerprint:
    """What was seen of `ref` at Unix time `at`: digests over the tensors' digests, by name. `wrong`: tensors that
    differ."""

    ref: VersionRef
    published: str
    live: str
    at: float
    wrong: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For heartbeats and `/server_info`."""
        return {
            "version": str(self.ref),
            "published": self.published,
            "live": self.live,
            "at": self.at,
            "wrong": list(self.wrong[:3]),
        }


@dataclass(frozen=True)
class Published:
    """Checksums of a version's tensors by name, and the dtypes that occur."""

    digests: Mapping[str, str]
    dtypes: frozenset[str]


class ProvenStager:
    """A stager that remembers the checksums of what it built, of the last versions."""

    def __init__(self, inner: Stager):
        self._inner = inner
        self._known: dict[VersionRef, Published] = {}

    async def materialize(self, target: VersionRef) -> Materialized:
        """See `Stager`."""
        done = await self._inner.materialize(target)
        if target not in self._known:
            self._known[target] = await asyncio.to_thread(self._digests, done)
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return done

    def published(self, ref: VersionRef) -> Published | None:
        """Checksums of `ref`, None if it was not built here lately."""
        return self._known.get(ref)

    def close(self) -> None:
        """Release the directory."""
        if (close := getattr(self._inner, "close", None)) is not None:
            close()

    def _digests(self, done: Materialized) -> Published:
        """The staged files were verified against the published checksums; a patch says which tensors are new."""
        before = None if done.previous is None else self._known.get(done.previous)
        with open_checkpoint(done.path) as checkpoint:
            dtypes = frozenset(info.dtype for info in checkpoint.tensors.values())
            if before is None or done.patch is None:
                return Published(tensor_digests(checkpoint), dtypes)
            changed = {name: digest(checkpoint.bytes(name)) for name in patch_names(read_header(done.patch))}
        return Published({**before.digests, **changed}, dtypes)


class Prover:
    """Looks at the live weights every `interval` seconds and after every activation."""

    def __init__(
        self,
        replica: Replica,
        stager: ProvenStager,
        interval: float,
        export: Callable[[], Awaitable[Mapping[str, str]]] | None = None,
    ):
        """export: digests of the live tensors of an engine that has no route for them; CannotLook."""
        self._replica, self._stager, self._interval, self._export = replica, stager, interval, export
        self._exporting, self._said = False, ""
        self.supported = True
        self.refuted = 0

    async def run(self) -> None:
        """Until cancelled, or until it is clear that this engine cannot be looked at."""
        while self.supported:
            seen, begun = self._state(), time.monotonic()
            try:
                await self.check()
            except CannotLook as error:
                self.supported = False
                log.warning("%s: no fingerprint: %s", self._replica.replica_id, error)
            except EngineError as error:  # a dead engine is the reconciler's business
                if str(error) != self._said:
                    log.warning("%s: no fingerprint yet: %s", self._replica.replica_id, error)
                self._said = str(error)
            if self._exporting:  # that copies all weights: a small share of the time only
                await asyncio.sleep(_REST * (time.monotonic() - begun))
            await self._until_changed(seen)

    async def check(self) -> Fingerprint | None:
        """Compare now; None where there is nothing to compare. Fences the replica if its weights are wrong."""
        replica, ref = self._replica, self._replica.applied
        published = None if ref is None else self._stager.published(ref)
        if ref is None or published is None or replica.activator.busy:
            return None
        before = self._state()
        live = await self._live(published)
        if replica.activator.busy or self._state() != before:
            return None
        wrong = tuple(sorted(name for name, value in live.items() if published.digests.get(name) != value))
        expected = {name: published.digests.get(name, "") for name in live}
        found = Fingerprint(ref, _digest(expected), _digest(live), time.time(), wrong)
        replica.fingerprint = found
        if wrong:
            self.refuted += 1
            what = f"live weights are not the published {ref}: {len(wrong)} tensor(s), {', '.join(wrong[:3])}"
            log.error("%s: %s; loading them again", replica.replica_id, what)
            replica.activator.fence(what)
        return found

    async def _live(self, published: Published) -> Mapping[str, str]:
        """Digests of the engine's own tensors by name."""
        if not self._exporting:
            try:
                live = await self._replica.engine.weights_digest()
            except EngineError as error:
                if error.status not in (403, 404, 405):
                    raise
                self._exporting = True
            else:
                await self._check_comparable(live, published)
                return live
        if self._export is None:
            raise CannotLook("the engine has no route for the digests of its weights")
        return await self._export()

    async def _check_comparable(self, live: Mapping[str, str], published: Published) -> None:
        """CannotLook if this engine holds other tensors, or the same in another dtype: then its bytes prove nothing."""
        dtype = (await self._replica.engine.server_info()).get("dtype")
        same = {OF_TORCH.get(f"torch.{dtype}")} == set(published.dtypes) and bool(live)
        if not same or not live.keys() <= published.digests.keys():
            raise CannotLook("the engine serves another dtype or layout")

    def _state(self) -> tuple[object, VersionRef | None]:
        """Changes with every activation."""
        history = self._replica.activator.history
        return history[-1] if history else None, self._replica.applied

    async def _until_changed(self, seen: tuple[object, VersionRef | None]) -> None:
        deadline = time.monotonic() + self._interval
        while self._state() == seen and (left := deadline - time.monotonic()) > 0:
            await self._replica.gate.wait_changed(left)


def _digest(digests: Mapping[str, str]) -> str:
    return digest(repr(sorted(digests.items())).encode())
