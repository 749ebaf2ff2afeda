"""Awaiting Ray calls with a deadline and a reason.

Every remote call of the driver goes through here, so nothing waits for ever and a dead actor is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import ray.exceptions

from miles_disagg.domain.errors import DeadlineExceeded, MilesDisaggError


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
    future = asyncio.wrap_future(reference.future())
    try:
        return await asyncio.wait_for(future, timeout)
    except TimeoutError:
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
