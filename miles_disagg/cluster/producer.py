"""The rollout producer of a run as one object: every call has a deadline, and an actor that died is replaced.

A new actor gets the books as they were last handed over whole (at the start, or with a checkpoint) and the prompts that
were trained on since. What the dead one had in flight or queued is handed out again: no prompt is lost, none is trained
on twice. What an actor does is `rollout.actor`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray

from miles_disagg.cluster.calls import ActorLost, call

DEATHS = 5  # of the actor in one run, before the run ends with the error


class RemoteProducer:
    """Calls the producer's methods by name. make: creates an actor; setup_timeout: seconds to read the prompts."""

    def __init__(self, make: Callable[[], Any], setup_timeout: float, say: Callable[[str], None]):
        self._make, self._setup_timeout, self._say = make, setup_timeout, say
        self._actor: Any = None
        self._books: dict[str, Any] | None = None
        self._trained: list[str] = []  # since the books
        self._trained_ever = self._told = 0  # keys of the whole run; of them, those that the last new actor was told
        self._version: int | None = None
        self._consumed, self._consumed_at = 0, -1
        self._started = False
        self._replacing = asyncio.Lock()
        self.deaths = 0

    async def set_up(self) -> None:
        """Start the actor and let it read the prompts."""
        self._actor = self._make()
        await self._call("setup", "read the prompts", timeout=self._setup_timeout)
        self._books = self._books or await self._call("state", "hand over its books", timeout=300.0)

    async def ask(self, method: str, what: str, *args: Any, timeout: float = 30.0) -> Any:
        """Result of a method; `what` is for messages. Asked again of a new actor when the old one died.

        ActorLost after too many deaths; DeadlineExceeded; whatever the method raises.
        """
        if method == "trained":
            self._trained.extend(args[0])
            self._trained_ever += len(args[0])
        mine = self._trained_ever
        while True:
            async with self._replacing:  # a new actor knows nothing until it has its books
                actor = self._actor
            if method == "trained" and mine <= self._told:
                return None  # it was told with its books
            try:
                result = await self._call(method, what, *args, timeout=timeout)
            except ActorLost as error:
                await self._replace(actor, error)
                continue
            self._note(method, args, result)
            return result

    async def advance(self, version: int) -> None:
        """A version was published."""
        self._version = version
        await self.ask("advance", "note the new version", version)

    async def close(self, timeout: float) -> None:
        """Release what the actor holds, and end it."""
        try:
            await self._call("close", "close", timeout=timeout)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the actor now."""
        if self._actor is not None:
            ray.kill(self._actor)

    def _note(self, method: str, args: tuple[Any, ...], result: Any) -> None:
        if method == "state":
            self._books, self._trained = result, []
        elif method == "load_state":
            self._books, self._version, self._trained = args[0], args[1], []
        elif method in ("start", "stop"):
            self._started = method == "start"
        elif method in ("next_batch", "produce_and_take"):
            if result.trainer_version != self._consumed_at:
                self._consumed, self._consumed_at = 0, result.trainer_version
            self._consumed += len(result.groups)

    async def _replace(self, dead: Any, error: ActorLost) -> None:
        async with self._replacing:
            if self._actor is not dead:
                return  # another call has seen to it
            self.deaths += 1
            if self.deaths > DEATHS:
                raise error
            self._say(f"{error} A new one takes up its books, and {len(self._trained)} prompts trained on since")
            self.kill()
            await self.set_up()
            consumed = self._consumed if self._consumed_at == self._version else 0
            books, self._told = (self._books, self._version, consumed, list(self._trained)), self._trained_ever
            await self._call("load_state", "take up its books", *books, timeout=300.0)
            if self._started:
                await self._call("start", "start generating")

    async def _call(self, method: str, what: str, *args: Any, timeout: float = 30.0) -> Any:
        return await call(getattr(self._actor, method).remote(*args), f"rollout producer: {what}", timeout)
