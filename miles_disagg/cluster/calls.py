"""Awaiting Ray calls with a deadline and a reason.

Every remote call of the driver goes through here, so nothing waits for ever and a dead actor is named. What ends a run
whose part is lost for good, while it waits for something else, is a `Lifeline`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

import ray.exceptions

from miles_disagg.domain.errors import DeadlineExceeded, MilesDisaggError

T = TypeVar("T")


class ActorLost(MilesDisaggError):
    """An actor of this run died. Names it and says where its log is."""

    def __init__(self, what: str, detail: str):
        self.what = what
        super().__init__(
            f"{what}: its process died ({detail}). Its log is in Ray's session directory and in RUN_DIR/logs."
        )


async def call(reference: Any, what: str, timeout: float) -> Any:
    """Result of a Ray object reference.

    what: "actor name: action", for messages. Raises DeadlineExceeded after `timeout` seconds, ActorLost when the actor
    is dead, and the actor's own exception (not Ray's wrapper) when the call raised one of ours.
    """
    future, scope = asyncio.wrap_future(reference.future()), asyncio.timeout(timeout)
    try:
        async with scope:  # wait_for may lose a cancellation that meets the answer
            return await future
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceeded(what, timeout, "the actor did not answer") from None
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MilesDisaggError):
            raise cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise ActorLost(what, str(error).strip().splitlines()[0] if str(error).strip() else "no reason given") from None


async def call_all(references: Iterable[tuple[Any, str]], timeout: float) -> list[Any]:
    """Results of several references, in order; the first error cancels the wait for the others."""
    tasks = [asyncio.ensure_future(call(ref, what, timeout)) for ref, what in references]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


class Pulse:
    """Asks one actor how it is, again and again; one that owes `owed` answers in a row, `seconds` each, hangs."""

    def __init__(self, name: str, *, seconds: float = 10.0, owed: int = 3):
        self._name, self._seconds, self._owed = name, seconds, owed
        self._missed = 0

    async def ask(self, reference: Any, what: str) -> Any:
        """Its answer. ActorLost if it died, or owes too many; DeadlineExceeded while it may only be slow."""
        try:
            answer = await call(reference, f"{self._name}: {what}", self._seconds)
        except DeadlineExceeded as error:
            self._missed += 1
            if self._missed < self._owed:
                raise
            raise ActorLost(self._name, f"it owes {self._missed} answers in a row: {error}") from None
        self._missed = 0
        return answer


class Lifeline:
    """Who finds that a part of a run is lost for good cuts it; who waits for that part hears of it at once."""

    def __init__(self) -> None:
        self.error: MilesDisaggError | None = None
        self._cut = asyncio.Event()

    def cut(self, error: MilesDisaggError) -> None:
        """The run cannot go on, because of `error`; the first one counts."""
        self.error = self.error or error
        self._cut.set()

    async def hold(self, work: Awaitable[T]) -> T:
        """Result of `work`, or the error if the line is cut before it is there; `work` is cancelled then."""
        task, cut = asyncio.ensure_future(work), asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({task, cut}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            assert self.error is not None
            raise self.error
        finally:
            for waiting in (task, cut):
                waiting.cancel()
            await asyncio.gather(task, cut, return_exceptions=True)
