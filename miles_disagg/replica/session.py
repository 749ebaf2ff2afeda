"""Serving one request: stream from the engine, attribute tokens, survive activations, answer each rid once.

The engine is always asked to stream, also when the caller is not, so that token spans are exact. A `Generation` may
take several engine requests (legs) where an activation sent it back. HTTP is `app`; who may start is `gate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from miles_disagg.domain.errors import (
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
)
from miles_disagg.engine.base import Engine
from miles_disagg.replica.assemble import Assembler, GenerateAssembler, OpenAIAssembler
from miles_disagg.replica.gate import Flight, Gate, StopKind
from miles_disagg.replica.wire import GENERATE, RolloutRequest, stamp

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionLimits:
    """Times in seconds, and how much of finished answers is kept for repeated rids."""

    admission_wait: float = 30.0  # for a running activation to end
    reopen_wait: float = 600.0  # of an interrupted request, for the replica to serve again
    request: float = 3600.0  # whole generation
    cached_answers: int = 2048
    cached_tokens: int = 1_000_000
    cached_seconds: float = 300.0


class Generation:
    """One rollout request in progress, with any number of callers waiting for it."""

    _ids = itertools.count()

    def __init__(
        self,
        request: RolloutRequest,
        engine: Engine,
        gate: Gate,
        replica_id: str,
        limits: SessionLimits,
        *,
        sparse: bool = False,
    ):
        self.request, self._engine, self._gate = request, engine, gate
        self._replica_id, self._limits = replica_id, limits
        self.assembler: Assembler = (
            GenerateAssembler(request.body, request.rid, sparse=sparse and not request.body.get("stream"))
            if request.path == GENERATE
            else OpenAIAssembler(request.path, request.body, request.rid)
        )
        self.flight: Flight | None = None
        self.callers = 0
        self.shown: list[dict[str, Any]] = []  # chunks that callers have seen or should see
        self._dropped = 0  # chunks that a later cumulative one replaced
        self._news = asyncio.Event()
        self._streaming = False  # a leg is being read
        self._abandoned = False
        self.task = asyncio.create_task(self._run(), name=f"generation {request.rid}")
        self.task.add_done_callback(lambda _: self._announce())

    # --- callers ------------------------------------------------------------------------------------

    async def result(self) -> dict[str, Any]:
        """The complete answer, stamped. Cancelling the last caller frees the engine."""
        with self._caller():
            return await asyncio.shield(self.task)

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks as they come, stamped; the last carries the final attribution. Cumulative ones may be skipped."""
        with self._caller():
            cursor = 0
            while True:
                news = self._news
                while cursor < self._dropped + len(self.shown):
                    cursor = max(cursor, self._dropped)
                    chunk = self.shown[cursor - self._dropped]
                    cursor += 1
                    yield self._stamped(self.flight, chunk) if self.assembler.cumulative and self.flight else chunk
                if self.task.done():
                    await self.task  # raises what went wrong
                    return
                await news.wait()

    @contextlib.contextmanager
    def _caller(self) -> Iterator[None]:
        self.callers += 1
        try:
            yield
        finally:
            self.callers -= 1
            if self.callers == 0 and not self.task.done():
                self._abandoned = True
                self.task.cancel()

    # --- the work -----------------------------------------------------------------------------------

    async def _run(self) -> dict[str, Any]:
        gate, request = self._gate, self.request
        flight = await gate.admit(request.rid, request.constraint, self._limits.admission_wait)
        self.flight, flight.on_stop = flight, self._interrupt
        try:
            async with asyncio.timeout(self._limits.request):
                while not self.assembler.finished:
                    await self._leg(flight)
                    if not self.assembler.finished:
                        await self._resume(flight)
            return self._stamped(flight, self.assembler.answer())
        except TimeoutError:
            raise DeadlineExceeded("the end of a generation", self._limits.request, f"rid {request.rid}") from None
        finally:
            gate.leave(flight)

    async def _leg(self, flight: Flight) -> None:
        """Read one engine request to its end or interruption."""
        if flight.stop is not None:
            return
        engine_rid = f"{next(self._ids)}.{self.request.rid}"  # engines abort by prefix: the unique part goes first
        body = self.assembler.engine_body(flight.cache_key, engine_rid)
        ended = False
        try:
            self._streaming = True
            stream = cast(AsyncGenerator[dict[str, Any], None], self._engine.stream(body, self.request.path))
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    self._take(flight, chunk)
            ended = True
            if not self.assembler.finished:
                raise EngineUnavailable("the engine's stream ended before the generation did")
        except asyncio.CancelledError:
            if self._abandoned or flight.stop is None:
                raise
            task = asyncio.current_task()
            assert task is not None
            if task.uncancel() > 0:
                raise
        finally:
            self._streaming = False
            if not ended:
                await self._abort(engine_rid)

    def _take(self, flight: Flight, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            error = chunk["error"] if isinstance(chunk["error"], dict) else {"message": str(chunk["error"])}
            code = error.get("code")
            raise EngineError(str(error.get("message")), code if isinstance(code, int) else 500)
        shown = self.assembler.add(chunk)
        self._gate.record(flight, self.assembler.tokens, self.assembler.engine_version)
        if shown is not None:  # a cumulative chunk is stamped when somebody looks at it, most are never looked at
            self._show(shown if self.assembler.cumulative else self._stamped(flight, shown))

    async def _resume(self, flight: Flight) -> None:
        """After an interruption: go on under the new weights, end by name, or fail."""
        stop = flight.stop
        assert stop is not None
        kind = stop.kind
        if kind is StopKind.RESTART and not self.assembler.continuable():
            kind = StopKind.END
        if kind is StopKind.FAIL:
            raise EngineUnavailable(stop.reason)
        if kind is StopKind.END:
            self._show(self._stamped(flight, self.assembler.end(stop.reason)))
            return
        self.assembler.next_leg()
        await self._gate.reopened(flight, self._limits.reopen_wait)
        if flight.stop is not stop:
            return  # a stronger interruption came meanwhile; `_leg` sees it
        self._gate.readmit(flight)

    async def _abort(self, engine_rid: str) -> None:
        """Free the engine. Closing the stream does it too; this is for certainty, and may not keep anybody waiting."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(2.0):
                await self._engine.abort(engine_rid)

    def _interrupt(self) -> None:
        if self._streaming and not self.assembler.finished:
            self.task.cancel()

    # --- results ------------------------------------------------------------------------------------

    def _stamped(self, flight: Flight, message: dict[str, Any]) -> dict[str, Any]:
        spans = flight.spans
        if isinstance(self.assembler, OpenAIAssembler) and not self.assembler.single_choice and len(spans) > 1:
            spans = None
        stamp(
            self.assembler.stamp_target(message),
            start=flight.version_start,
            end=flight.version_end,
            spans=spans,
            tokens=flight.tokens,
            replica_id=self._replica_id,
            run_id=None if self._gate.served is None else self._gate.served.run_id,
        )
        return message

    def _show(self, chunk: dict[str, Any]) -> None:
        if self.assembler.cumulative:
            self._dropped += len(self.shown)
            self.shown.clear()
        self.shown.append(chunk)
        self._announce()

    def _announce(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


@dataclass(frozen=True)
class Answer:
    """A finished generation. `chunks`: what a streaming caller gets when it asks again."""

    fingerprint: bytes
    answer: dict[str, Any]
    chunks: list[dict[str, Any]]
    oldest: int
    newest: int
    tokens: int
    until: float


class Sessions:
    """Every rid in flight or recently finished on this replica; joins repeated ones. Failures are not kept."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        replica_id: str,
        limits: SessionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine, self._gate, self._replica_id = engine, gate, replica_id
        self.announced_pauses = False  # the engine says at a pause what it has: callers who do not stream need no more
        self.limits, self._clock = limits or SessionLimits(), clock
        self._running: dict[str, Generation] = {}
        self._finished: OrderedDict[str, Answer] = OrderedDict()
        self._cached_tokens = 0
        self.totals = {
            "requests": 0,
            "joined": 0,
            "answered_from_cache": 0,
            "tokens": 0,
            "failed": 0,
            "disconnected": 0,
        }

    def lookup(self, request: RolloutRequest) -> Answer | None:
        """What this rid was already answered, if it is still known and right for this request."""
        self._expire()
        kept = self._finished.get(request.rid)
        if kept is None:
            return None
        self._check_same(request, kept.fingerprint)
        constraint = request.constraint
        if not (constraint.satisfied_by(kept.oldest) and constraint.satisfied_by(kept.newest)):
            raise InvalidRequest(
                f"rid: {request.rid!r} was answered at version {kept.oldest}, now asks for {constraint}; use a new rid"
            )
        self.totals["answered_from_cache"] += 1
        return kept

    def start(self, request: RolloutRequest) -> Generation:
        """Start a generation, or join the one in flight under the same rid."""
        running = self._running.get(request.rid)
        if running is not None and not running.task.done() and not running._abandoned:
            self._check_same(request, running.request.fingerprint)
            flight, wanted = running.flight, request.constraint
            at_least = wanted.exact_version is None and flight is not None and wanted.satisfied_by(flight.version_start)
            if wanted != running.request.constraint and not at_least:
                raise InvalidRequest(
                    f"rid: {request.rid!r} is being generated under {running.request.constraint}, now asks for "
                    f"{wanted}; use a new rid"
                )
            self.totals["joined"] += 1
            return running
        self.totals["requests"] += 1
        generation = Generation(
            request, self._engine, self._gate, self._replica_id, self.limits, sparse=self.announced_pauses
        )
        self._running[request.rid] = generation
        generation.task.add_done_callback(lambda _: self._finish(generation))
        return generation

    async def result(self, request: RolloutRequest) -> dict[str, Any]:
        """The answer to `request`, generated once."""
        known = self.lookup(request)
        return known.answer if known is not None else await self.start(request).result()

    async def stream(self, request: RolloutRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks of the answer, generated once."""
        known = self.lookup(request)
        if known is not None:
            for chunk in known.chunks:
                yield chunk
            return
        async with aclosing(self.start(request).stream()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def close(self) -> None:
        """End everything in flight."""
        tasks = [g.task for g in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _check_same(request: RolloutRequest, fingerprint: bytes) -> None:
        if request.fingerprint != fingerprint:
            raise InvalidRequest(f"rid: {request.rid!r} was used for another request; use a new rid")

    def _finish(self, generation: Generation) -> None:
        rid, task = generation.request.rid, generation.task
        if self._running.get(rid) is generation:
            del self._running[rid]
        if task.cancelled():
            self.totals["disconnected"] += 1
            return
        if task.exception() is not None:
            self.totals["failed"] += 1
            return
        flight = generation.flight
        assert flight is not None
        self.totals["tokens"] += flight.tokens
        versions = [s.version for s in flight.spans] or [flight.version_start]
        until = self._clock() + self.limits.cached_seconds
        self._finished[rid] = Answer(
            generation.request.fingerprint,
            task.result(),
            generation.shown,
            min(versions),
            max(versions),
            flight.tokens,
            until,
        )
        self._cached_tokens += flight.tokens
        self._expire()

    def _expire(self) -> None:
        now, limits = self._clock(), self.limits
        while self._finished:
            oldest = next(iter(self._finished.values()))
            full = len(self._finished) > limits.cached_answers or self._cached_tokens > limits.cached_tokens
            if not full and oldest.until > now:
                return
            self._finished.popitem(last=False)
            self._cached_tokens -= oldest.tokens
