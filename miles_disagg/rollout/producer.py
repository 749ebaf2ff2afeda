"""Keeps a bounded number of samples in flight and pushes scored groups into the buffer.

Admission is `pacing`, one group is `generation`, the queue is `buffer.data_buffer`, the books are `prompts.ledger`.
Plain asyncio, one event loop, no Ray: `actor` wraps it. Producer, buffer and ledger live in one process, so that the
books are never behind what happened.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from miles_disagg.buffer.base import Buffer, BufferClosed
from miles_disagg.domain.errors import DeadlineExceeded
from miles_disagg.domain.samples import Prompt, SampleGroup
from miles_disagg.domain.versions import Constraint
from miles_disagg.prompts.base import PromptSource, Reward
from miles_disagg.prompts.ledger import Ledger
from miles_disagg.rollout.base import GenerationClient, GroupFilter, RolloutOptions, SamplingOptions
from miles_disagg.rollout.generation import GroupFailed, GroupGenerator
from miles_disagg.rollout.pacing import Pacing
from miles_disagg.rollout.slots import Slots


class Producer:
    """Prompts in, scored groups out, never more than can be consumed within the staleness bound.

    Asynchronous schedule: `start()`, then `advance(version)` after every publication; the trainer takes batches from
    the buffer. Synchronous schedule: `await produce(n, constraint)` instead. `trained(keys)` closes the books of a
    batch. An unexpected exception ends production and is raised by `raise_failure()`, `produce` and `stop`.
    """

    def __init__(
        self,
        client: GenerationClient,
        source: PromptSource,
        reward: Reward,
        buffer: Buffer,
        ledger: Ledger,
        options: RolloutOptions,
        sampling: SamplingOptions,
        *,
        run_id: str,
        version: int = 0,
        group_filter: GroupFilter | None = None,
        on_group: Callable[[SampleGroup], None] | None = None,
    ):
        self._source, self._buffer, self.ledger, self._options = source, buffer, ledger, options
        self._filter, self._on_group = group_filter, on_group
        self._slots = Slots(options.max_concurrent_samples)
        self._generator = GroupGenerator(client, reward, options, sampling, self._slots, run_id)
        self._pacing = Pacing(options.max_staleness, options.groups_per_version, version, version)
        self._retries: deque[Prompt] = deque()
        self._tasks: dict[asyncio.Task[None], tuple[Prompt, int]] = {}  # with the attempt
        self._surplus: set[asyncio.Task[None]] = set()  # started for the batch, and not needed any more
        self._loop_task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._paused = False
        self._held_back = 0  # finished groups that wait for room in the buffer
        self._failure: BaseException | None = None
        self._epoch = 0
        self._failures: Counter[str] = Counter()  # groups in a row, by prompt
        self.poison: dict[str, str] = {}
        self.drop_reasons: Counter[str] = Counter()
        buffer.listen(self)

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the asynchronous schedule."""
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._run(), name="producer")
            self._loop_task.add_done_callback(self._check)

    def pause(self) -> None:
        """Start no further group; what is in flight goes on."""
        self._paused = True

    def resume(self) -> None:
        """Start groups again."""
        self._paused = False
        self._changed.set()

    def advance(self, version: int) -> None:
        """A version was published: groups for the next steps may start."""
        self._pacing.advance(version)
        self._changed.set()

    async def drain(self, timeout: float) -> None:
        """Pause, and wait until nothing is in flight. DeadlineExceeded names how much still is."""
        self.pause()
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks), timeout=timeout)
            if late:
                raise DeadlineExceeded("groups in flight to finish", timeout, self.upstream())
        self.raise_failure()

    async def stop(self) -> None:
        """End at once: cancel what is in flight (dropped as `stopped`). Raises what ended production, if anything."""
        tasks = list(self._tasks)
        if self._loop_task is not None:
            tasks.append(self._loop_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop_task = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the unexpected exception that ended production, if there was one."""
        if self._failure is not None:
            raise self._failure

    # --- schedules ----------------------------------------------------------------------------

    async def _run(self) -> None:
        held = self._options.n_samples_per_prompt if self._options.granularity == "group" else 1
        while True:
            # Slots are taken last: holding them while pacing says no could starve the very group it waits for.
            await self._admission()
            await self._slots.acquire(held)
            constraint = self._constraint()
            prompt = None if constraint is None else self._next_prompt()
            if prompt is not None and constraint is not None:
                self._launch(prompt, constraint, held)
                continue
            self._slots.release(held)
            if constraint is not None:
                await self._end_of_data()

    def _constraint(self) -> Constraint | None:
        # Slots bound what is with the engines; this bounds what is behind them, being scored or waiting for room.
        unscored = len(self._tasks) * self._options.n_samples_per_prompt
        if self._paused or self._held_back or unscored >= 2 * self._options.max_concurrent_samples:
            return None
        return self._pacing.constraint(self.outstanding)

    async def _admission(self) -> None:
        """Wait until one more group may start."""
        while self._constraint() is None:
            self._changed.clear()
            await self._changed.wait()

    async def _end_of_data(self) -> None:
        """Tell the buffer when the last prompt is through; return when there is one to hand out again."""
        while not self._retries:
            self._changed.clear()
            self._buffer.set_ended(not self._tasks)
            await self._changed.wait()
        self._buffer.set_ended(False)

    async def produce(self, n_groups: int, constraint: Constraint, timeout: float) -> None:
        """Synchronous schedule: see that `n_groups` scored, fresh groups are in the buffer, replacing those that fail.

        With over-sampling more are started at once; those that are not needed then are ended (`surplus`), or go on
        for the next call (`partial`). DeadlineExceeded after `timeout` s; fewer groups, and the buffer marked as ended,
        when the data is over.
        """
        started = n_groups + self._options.over_sampling_groups - self._options.batch_groups
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self.raise_failure()
                    self._changed.clear()
                    if constraint.min_version is not None:
                        await self._buffer.drop_stale(constraint.min_version, self._options.max_staleness)
                    if len(self._buffer) >= n_groups:
                        break
                    while len(self._buffer) + len(self._tasks) < started:
                        prompt = self._next_prompt()
                        if prompt is None:
                            break
                        self._launch(prompt, constraint, slots_held=0)
                    if not self._tasks:
                        self._buffer.set_ended(True)
                        return
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{n_groups} groups under {constraint}", timeout, self.upstream()) from None
        if not self._options.partial:
            await self._end_surplus()

    async def _end_surplus(self) -> None:
        """End what is still being generated; its prompts come again if the options say so."""
        self._surplus.update(self._tasks)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._surplus.clear()

    # --- one group ----------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Groups started and not yet taken by the trainer: in flight, or queued."""
        return len(self._tasks) + len(self._buffer)

    def _next_prompt(self) -> Prompt | None:
        if self._retries:
            return self._retries.popleft()
        prompt = self._source.next_prompt()
        while prompt is not None and self.ledger.is_trained(prompt.key):
            prompt = self._source.next_prompt()  # the cursor is older than what was trained on: see `load_state`
        if prompt is not None and prompt.epoch > self._epoch:
            self._epoch = prompt.epoch
            self.ledger.fold(before_epoch=prompt.epoch - 1)
        return prompt

    def _launch(self, prompt: Prompt, constraint: Constraint, slots_held: int) -> None:
        attempt = self.ledger.handed_out(prompt.key)
        task = asyncio.create_task(self._group(prompt, attempt, constraint, slots_held), name=f"group {prompt.key}")
        self._tasks[task] = (prompt, attempt)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        prompt, attempt = self._tasks.pop(task)
        entry = self.ledger.entry(prompt.key)
        # A group that failed may have been handed out again before this callback ran: that attempt is another task's.
        if entry.attempt == attempt and entry.state in ("generating", "in_flight"):
            surplus = task in self._surplus
            self._drop(prompt, "surplus" if surplus else "stopped" if task.cancelled() else "crashed")
            if not surplus or self._options.unused == "retry":
                self._retries.append(prompt)
        self._check(task)
        self._changed.set()

    def _check(self, task: asyncio.Task[None]) -> None:
        """An exception that nobody expected ends production, and says so to whoever waits for a batch."""
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self.pause()
            self._buffer.fail(error)

    async def _group(self, prompt: Prompt, attempt: int, constraint: Constraint, slots_held: int) -> None:
        try:
            group = await self._generator.group(prompt, attempt, constraint, slots_held)
        except GroupFailed as failure:
            self._drop(prompt, failure.reason)
            self._retry_or_give_up(prompt, str(failure))
            return
        self.ledger.generated(prompt.key)
        self._failures.pop(prompt.key, None)
        if self._on_group:
            self._on_group(group)
        reason = self._filter(group) if self._filter else None
        if reason is not None:
            self._drop(prompt, reason)
            return
        self._held_back += 1
        try:
            await self._buffer.put(group, self._options.put_timeout)
        except BufferClosed:
            self._drop(prompt, "closed")
        finally:
            self._held_back -= 1

    def _drop(self, prompt: Prompt, reason: str) -> None:
        self.drop_reasons[reason] += 1
        self.ledger.dropped(prompt.key, reason)

    def _retry_or_give_up(self, prompt: Prompt, why: str) -> None:
        self._failures[prompt.key] += 1  # not attempts: a restart or a stale group says nothing about the prompt
        if self._failures[prompt.key] < self._options.prompt_attempts:
            self._retries.append(prompt)
        else:
            self.poison[prompt.key] = why
            del self._failures[prompt.key]

    # --- what the buffer tells (BufferListener) -----------------------------------------------

    def queued(self, group: SampleGroup) -> None:
        """The buffer accepted a group."""
        self.ledger.queued(group.prompt.key)
        self._changed.set()

    def taken(self, group: SampleGroup, trainer_version: int) -> None:
        """The trainer took a group."""
        self._pacing.taken(1, trainer_version)
        self.ledger.taken(group.prompt.key)
        self._changed.set()

    def dropped(self, group: SampleGroup, reason: str) -> None:
        """A group left the buffer untrained; handed out again if the options say so."""
        self._drop(group.prompt, reason)
        if reason == "stale" and self._options.unused == "retry":
            self._retries.append(group.prompt)
            self._buffer.set_ended(False)
        self._changed.set()

    def upstream(self) -> str:
        """One line on what is on its way and what stands in the way."""
        parts = [
            f"in flight {len(self._tasks)} groups ({self._slots.used} samples generating)",
            f"newest published version {self._pacing.published}",
        ]
        if self._paused:
            parts.append("the producer is paused")
        if self._failure is not None:
            parts.append(f"production ended: {type(self._failure).__name__}: {self._failure}")
        if self._generator.rejected:
            parts.append("failures " + ", ".join(f"{k} {v}" for k, v in self._generator.rejected.most_common(5)))
        if self.poison:
            parts.append(f"{len(self.poison)} prompts given up, last: {list(self.poison.values())[-1]}")
        return ", ".join(parts)

    # --- books ----------------------------------------------------------------------------------

    def trained(self, keys: list[str]) -> None:
        """An optimizer step consumed these prompts."""
        self.ledger.trained(keys)

    def metrics(self) -> dict[str, float]:
        """`rollout/in_flight`, `rollout/fully_async/*`, `rollout/ledger/*`; LedgerError if they do not balance."""
        totals = self.ledger.check()
        aborted, dropped = sum(totals["failed"].values()), sum(totals["dropped"].values())
        counted = ("generated", "trained", "queued", "in_flight", "retried")
        return {
            **self._buffer.metrics(),
            **{f"rollout/ledger/{name}": float(totals[name]) for name in counted},
            "rollout/ledger/dropped": float(dropped),
            "rollout/ledger/given_up": float(len(self.poison)),
            "rollout/in_flight": float(self._slots.used),
            "rollout/fully_async/aborted_groups_filtered": float(aborted),
        }

    def state(self) -> dict[str, Any]:
        """JSON-able: cursor, books, queued groups, and prompts to hand out again after a restart."""
        return {
            "source": dict(self._source.state()),
            "ledger": self.ledger.state(),
            "buffer": self._buffer.snapshot(),
            "retries": [p.key for p in self._retries],
            "poison": dict(self.poison),
            "failures": dict(self._failures),
            "pacing": dataclasses.asdict(self._pacing),
        }

    def load_state(
        self, state: Mapping[str, Any], *, version: int | None = None, consumed: int = 0, trained: Iterable[str] = ()
    ) -> None:
        """Continue from `state`, before anything is started. What was in flight then is handed out again.

        version: the published version, if it is another than when the state was made; what is queued but too old for
        it is handed out again too. consumed: groups that the trainer has taken since the last regular publication.
        trained: prompts that were trained on after the state was made; they are not handed out again.
        """
        trained = list(trained)
        done = set(trained)
        saved, now = state["pacing"], self._pacing
        now.published, now.trainer_version, now.consumed = (
            saved[k] for k in ("published", "trainer_version", "consumed")
        )
        queued = [g for g in state["buffer"]["groups"] if _key(g) not in done]
        if version is not None:
            now.published, now.trainer_version, now.consumed = version, version, consumed
            oldest = 0 if now.max_staleness is None else version - now.max_staleness
            queued = [g for g in queued if all(v >= oldest for s in g["samples"] for _, v in s["spans"])]
        self._source.load_state(state["source"])
        self._buffer.restore({**state["buffer"], "groups": queued})
        self.ledger.load_state(state["ledger"])
        self.ledger.trained_elsewhere(trained)
        lost = self.ledger.abandon("restart", keep=[_key(g) for g in queued])
        again = [key for key in [*lost, *state["retries"]] if key not in done]
        self._retries.extend(self._source.prompt(key) for key in again)
        self.poison, self._failures = dict(state["poison"]), Counter(state.get("failures", {}))


def _key(group: Mapping[str, Any]) -> str:
    return f"{group['prompt']['epoch']}:{group['prompt']['index']}"
