"""Rewards computed for many samples at once: a decorator for functions of a list.

Single rewards, deadlines and checks of what comes back are `reward`.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from miles_disagg.domain.errors import RewardError
from miles_disagg.domain.samples import Sample

BatchFunction = Callable[[Sequence[Sample]], Sequence[float]]


@dataclass
class _Waiting:
    """Samples of one event loop that no call has taken yet."""

    entries: list[tuple[Sample, asyncio.Future[float]]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    running: set[asyncio.Task[None]] = field(default_factory=set)


def batched(*, most: int = 64, wait: float = 0.05) -> Callable[[BatchFunction], Callable[[Sample], Awaitable[float]]]:
    """Make a reward function of a function that scores a list of samples, for instance with one model call.

    Samples that are asked for within `wait` seconds share a call, at most `most` of them, in a thread of its own. Give
    --reward-workers at least `most`, since that many must be waiting to fill a call, and --reward-timeout the time of a
    whole call. RewardError for every sample of a call that raised, or returned another number of rewards.
    """

    def decorate(function: BatchFunction) -> Callable[[Sample], Awaitable[float]]:
        loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiting] = weakref.WeakKeyDictionary()

        @functools.wraps(function)
        async def reward(sample: Sample) -> float:
            loop = asyncio.get_running_loop()
            waiting = loops.setdefault(loop, _Waiting())
            future: asyncio.Future[float] = loop.create_future()
            waiting.entries.append((sample, future))
            if len(waiting.entries) >= most:
                _go(waiting, function)
            elif waiting.task is None:
                waiting.task = loop.create_task(_later(waiting, function, wait))
            return await future

        return reward

    return decorate


async def _later(waiting: _Waiting, function: BatchFunction, wait: float) -> None:
    await asyncio.sleep(wait)
    waiting.task = None
    _go(waiting, function)


def _go(waiting: _Waiting, function: BatchFunction) -> None:
    """Start a call on everything that waits."""
    entries, waiting.entries = waiting.entries, []
    if waiting.task is not None:
        waiting.task.cancel()
        waiting.task = None
    if entries:
        task = asyncio.get_running_loop().create_task(_call(entries, function))
        waiting.running.add(task)
        task.add_done_callback(waiting.running.discard)


async def _call(entries: Sequence[tuple[Sample, asyncio.Future[float]]], function: BatchFunction) -> None:
    samples = [sample for sample, _ in entries]
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        values: Sequence[float] = await asyncio.to_thread(function, samples)
        if len(values) != len(samples):
            raise RewardError(f"reward {name} returned {len(values)} rewards for {len(samples)} samples")
    except Exception as error:
        for _, future in entries:
            if not future.done():
                future.set_exception(
                    error if isinstance(error, RewardError) else RewardError(f"reward {name} raised {error!r}")
                )
        return
    for (_, future), value in zip(entries, values, strict=True):
        if not future.done():
            future.set_result(value)
