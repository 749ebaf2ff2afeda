"""Rewards: built in by name, plugged in by import path, or an HTTP service; off the event loop, with a deadline.

A reward is a finite number or a RewardError that says why not. What happens to a sample without one is `rollout`'s.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Literal, cast

import aiohttp

from miles_disagg.config.imports import import_function
from miles_disagg.domain.errors import ConfigError, RewardError
from miles_disagg.domain.samples import Sample
from miles_disagg.prompts.base import RewardFunction

_MAX_HUNG = 16  # abandoned reward threads before every further call is refused


def exact(sample: Sample) -> float:
    """1.0 if the response equals the label, outer white space aside, else 0.0."""
    return float(sample.text.strip() == _label(sample).strip())


def math_answer(sample: Sample) -> float:
    """1.0 if math-verify finds the response's final answer equal to the label, else 0.0."""
    from math_verify import parse, verify

    # No alarm-based limits of its own: they work in main threads only. The caller's deadline holds instead.
    no_alarm: Any = None
    gold = parse(_label(sample), parsing_timeout=no_alarm)
    return float(verify(gold, parse(sample.text, parsing_timeout=no_alarm), timeout_seconds=no_alarm))


def reasoning_gym_score(sample: Sample) -> float:
    """The score in [0, 1] that the item's own reasoning-gym data set gives to the response."""
    import reasoning_gym

    entry = sample.prompt.metadata.get("entry")
    if not isinstance(entry, dict) or "metadata" not in entry:
        raise RewardError(
            "reward reasoning-gym: the prompt's metadata has no `entry`; make the data with prompts.tasks"
        )
    score = cast(Any, reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"]))
    return float(score(answer=sample.text.strip(), entry=entry))


BUILT_IN: dict[str, Callable[[Sample], float]] = {
    "exact": exact,
    "math": math_answer,
    "reasoning-gym": reasoning_gym_score,
}
_INSTANT = (exact,)  # over before a thread would be started


def _label(sample: Sample) -> str:
    if sample.prompt.label is None:
        raise RewardError(f"prompt {sample.prompt.key} has no label to compare with; set --label-key")
    return sample.prompt.label


def task_reward(task: str) -> str:
    """The built-in reward that belongs to a task of `tasks`."""
    return "exact" if task == "addition" else "reasoning-gym"


def load_reward(
    rm_type: str | None = None, *, custom_path: str | None = None, url: str | None = None
) -> RewardFunction:
    """A built-in reward by its name (`remote_rm` asks `url`), or a function by import path `package.module.function`.

    ConfigError names the flag and what is known.
    """
    if custom_path is None:
        if rm_type == "remote_rm" and url:
            return RemoteReward(url)
        if rm_type not in BUILT_IN:
            raise ConfigError(
                [f"--rm-type {rm_type}: unknown; there are {', '.join(BUILT_IN)}, remote_rm (with --rm-url)"]
            )
        return BUILT_IN[rm_type]
    return cast(RewardFunction, import_function(custom_path, "--custom-rm-path"))


class RemoteReward:
    """Asks an HTTP service: POST `{"prompt", "response", "label", "metadata"}`, answered `{"reward": x}`."""

    def __init__(self, url: str):
        self.url = url
        # One session a loop: a session belongs to the loop it was made in.
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            weakref.WeakKeyDictionary()
        )

    async def __call__(self, sample: Sample) -> float:
        """The service's reward; RewardError on any other answer."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            session = self._sessions[loop] = aiohttp.ClientSession()
        body = {
            "prompt": sample.prompt.text,
            "response": sample.text,
            "label": sample.prompt.label,
            "metadata": dict(sample.prompt.metadata),
        }
        try:
            async with session.post(self.url, json=body) as response:
                if response.status != 200:
                    raise RewardError(f"reward service {self.url} answered {response.status}")
                answer = await response.json()
        except (aiohttp.ClientError, ValueError) as error:
            raise RewardError(f"reward service {self.url}: {error}") from error
        if not isinstance(answer, dict) or "reward" not in answer:
            raise RewardError(f"reward service {self.url}: the answer has no field 'reward'")
        return answer["reward"]

    async def close(self) -> None:
        """Close the connections."""
        for session in list(self._sessions.values()):
            await session.close()
        self._sessions.clear()


class RewardRunner:
    """Runs a reward function off the event loop, at most `workers` at once, each call within `timeout` seconds.

    `isolation="thread"` is light, but a call that hangs keeps its thread; after 16 of those every call is refused.
    `"process"` kills what hangs; the function must be importable and samples picklable. Async functions run on the
    loop itself: they are expected to wait, not to compute.
    """

    def __init__(
        self,
        function: RewardFunction,
        *,
        timeout: float = 10.0,
        workers: int = 4,
        isolation: Literal["thread", "process"] = "thread",
    ):
        self._function, self._timeout, self._workers, self._isolation = function, timeout, workers, isolation
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._slots = asyncio.Semaphore(workers)
        self._pool: ProcessPoolExecutor | None = None
        self.hung = 0

    async def __call__(self, sample: Sample) -> float:
        """A finite number. RewardError when the function raised, ran out of time or returned anything else."""
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout):
                    value = await self._call(sample)
            except TimeoutError as error:
                raise RewardError(
                    f"reward {self._name} took more than {self._timeout:g} s for {sample.sample_id}; "
                    "see --reward-timeout"
                ) from error
            except RewardError:
                raise
            except Exception as error:
                raise RewardError(
                    f"reward {self._name} raised {type(error).__name__} for {sample.sample_id}: {error}"
                ) from error
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise RewardError(f"reward {self._name} returned {value!r} for {sample.sample_id}, not a number") from error
        if not math.isfinite(number):
            raise RewardError(f"reward {self._name} returned {number} for {sample.sample_id}: not finite")
        return number

    async def _call(self, sample: Sample) -> Any:
        function = self._function
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            return await function(sample)  # pyright: ignore[reportGeneralTypeIssues]
        if function in _INSTANT:
            return cast(Callable[[Sample], float], function)(sample)
        if self._isolation == "process":
            return await self._in_process(sample)
        return await self._in_thread(sample)

    async def _in_thread(self, sample: Sample) -> Any:
        if self.hung >= _MAX_HUNG:
            raise RewardError(f"reward {self._name}: {self.hung} calls hang; it must return or raise by itself")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if done.cancelled():
                self.hung -= 1  # it came back after all
            elif error is not None:
                done.set_exception(error)
            else:
                done.set_result(value)

        def work() -> None:
            value, error = None, None
            try:
                value = self._function(sample)
            except BaseException as caught:
                error = caught if isinstance(caught, Exception) else RewardError(f"{type(caught).__name__}: {caught}")
            try:
                loop.call_soon_threadsafe(settle, value, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

        # A thread a call, not a pool: a hung one must not take a worker (or the interpreter's exit) with it.
        threading.Thread(target=work, name=f"reward-{self._name}", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            self.hung += 1
            raise

    async def _in_process(self, sample: Sample) -> Any:
        for _ in range(2):
            if self._pool is None:
                self._pool = ProcessPoolExecutor(self._workers, mp_context=get_context("spawn"))
            pool = self._pool
            try:
                return await asyncio.get_running_loop().run_in_executor(pool, self._function, sample)
            except asyncio.CancelledError:
                self._kill(pool)
                raise
            except BrokenProcessPool:
                self._kill(pool)  # ours crashed, or a neighbour was killed: once more in a new pool
        raise RewardError(f"reward {self._name}: its process died twice for {sample.sample_id}")

    def _kill(self, pool: ProcessPoolExecutor) -> None:
        if self._pool is pool:
            self._pool = None
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """End worker processes and connections."""
        if self._pool is not None:
            self._kill(self._pool)
        if isinstance(self._function, RemoteReward):
            await self._function.close()
