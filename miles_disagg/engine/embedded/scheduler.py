"""Continuous batching: which request runs in which row, step after step, in one thread.

Admission, prefill, decoding, stop conditions, pauses, and the order of weight updates among requests. The model is
`runner`; HTTP is `server`. Everything here runs in the scheduler's thread except `submit`, `call` and `stop`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from miles_disagg.domain.errors import InvalidRequest
from miles_disagg.engine.base import PauseMode
from miles_disagg.engine.embedded.requests import Chunk, Request
from miles_disagg.engine.embedded.runner import ModelRunner
from miles_disagg.engine.embedded.sampling import sample
from miles_disagg.engine.embedded.text import Text

_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


class _Update:
    """A weight update in the waiting line: runs once every request before it has ended."""

    def __init__(self, action: Callable[[], Any]):
        self.action = action
        self.future: Future[Any] = Future()

    def run(self) -> None:
        _settle(self.future, self.action)


class Scheduler:
    """Owns the runner and every request. `start` the thread, `submit` requests, `call` functions between steps."""

    def __init__(
        self,
        runner: ModelRunner,
        text: Text,
        eos: frozenset[int],
        version: str,
        stream_interval: int = 1,
        decode_interval: float = 0.0,
    ):
        self.runner, self.text, self.eos = runner, text, eos
        self.version = version
        self.stream_interval = stream_interval
        self.decode_interval = decode_interval  # seconds from one decode step to the next, at least
        self._decoded = 0.0
        self.paused: PauseMode | None = None
        self.rows: list[Request] = []  # row i of the cache is rows[i]
        self.waiting: deque[Request | _Update] = deque()
        self.by_rid: dict[str, Request] = {}
        self.steps = self.generated = self.prefilled = 0
        self.fatal: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)

    # --- from other threads -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests in flight are left where they are."""
        self._inbox.put(None)
        self._thread.join(timeout=10)

    def call(self, action: Callable[[], Any]) -> Future[Any]:
        """Run `action` in the scheduler's thread, between two steps."""
        future: Future[Any] = Future()
        self._inbox.put(lambda: _settle(future, action))
        return future

    def update(self, action: Callable[[], Any]) -> Future[Any]:
        """Run a weight update: at once when paused, else when every request submitted before has ended."""
        update = _Update(action)
        self._inbox.put(lambda: update.run() if self.paused else self.waiting.append(update))
        return update.future

    def submit(self, requests: list[Request]) -> Future[None]:
        """Queue requests, all or none. InvalidRequest if a rid is in flight already."""

        def enqueue() -> None:
            for request in requests:
                if request.rid in self.by_rid:
                    raise InvalidRequest(f"Duplicate request ID detected: {request.rid}")
            self.by_rid.update((r.rid, r) for r in requests)
            self.waiting.extend(requests)

        return self.call(enqueue)

    # --- control, in the thread ---------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. What was generated so far is announced, so that no chunk spans two versions."""
        self.paused = mode
        for update in [u for u in self.waiting if isinstance(u, _Update)]:  # a paused update does not wait
            self.waiting.remove(update)
            update.run()
        if mode == "abort":
            self.abort(None)
        for request in self.rows:
            self._announce(request)
        if mode == "retract":
            for request in reversed(self.rows):
                request.retractions += 1
                self.waiting.appendleft(request)
            self.rows.clear()

    def resume(self) -> None:
        """Go on stepping."""
        self.paused = None

    def abort(self, rid: str | None) -> int:
        """End the request `rid`, or those whose rid starts with it (members of a batch); None ends all."""
        hit = [r for r in self.by_rid.values() if rid is None or r.rid == rid or r.rid.startswith(rid + "_")]
        for request in hit:
            self._finish(request, dict(_ABORTED))
        self._drop_finished()
        self.waiting = deque(r for r in self.waiting if isinstance(r, _Update) or r.finish_reason is None)
        return len(hit)

    @property
    def idle(self) -> bool:
        """True if no request is running or held."""
        return not self.by_rid

    # --- the loop -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _loop(self) -> None:
        try:
            while True:
                blocked = self.paused is not None or (not self.rows and not self.waiting)
                if not self._drain(block=blocked):
                    return
                if self.paused is None:
                    self._run_updates()
                    self._admit()
                    self._step()
        except BaseException as e:  # a broken scheduler must be seen: the server exits on it
            self.fatal = e
            raise

    def _drain(self, *, block: bool) -> bool:
        """Run what other threads asked for; False when told to stop."""
        while True:
            try:
                action = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if action is None:
                return False
            action()
            block = False

    def _run_updates(self) -> None:
        while self.waiting and isinstance(self.waiting[0], _Update) and not self.rows:
            update = self.waiting.popleft()
            assert isinstance(update, _Update)
            update.run()

    def _admit(self) -> None:
        """Move waiting requests into free rows as long as the cache holds them, and prefill them together."""
        batch: list[Request] = []
        columns = max((r.length + 1 for r in self.rows), default=0)
        tokens = 0
        while self.waiting and isinstance(request := self.waiting[0], Request):
            wide = max(columns, request.length + 1)
            count = len(self.rows) + len(batch) + 1
            if not self.runner.cache.fits(count, wide):
                break
            if batch and tokens + request.length > self.runner.max_prefill_tokens:
                break
            columns, tokens = wide, tokens + request.length
            batch.append(request)
            self.waiting.popleft()
        if batch:
            self._prefill(batch)

    def _prefill(self, batch: list[Request]) -> None:
        want = [r.logprob_start if r.prompt_logprobs is None else None for r in batch]
        logits, scored = self.runner.prefill(len(self.rows), [r.tokens for r in batch], want)
        for request, logprobs in zip(batch, scored, strict=True):
            if logprobs is not None:
                request.prompt_logprobs = logprobs.tolist()
        self.rows.extend(batch)
        self.prefilled += sum(r.length for r in batch)
        self._accept(batch, logits)

    def _step(self) -> None:
        """One token for every row."""
        if not self.rows:
            return
        self._make_room()
        if (early := self._decoded + self.decode_interval - time.monotonic()) > 0:
            time.sleep(early)
        self._decoded = time.monotonic()
        logits = self.runner.decode([r.output[-1] for r in self.rows], [r.length - 1 for r in self.rows])
        self.steps += 1
        self._accept(self.rows, logits)

    def _make_room(self) -> None:
        """Send the newest requests back to wait while the batch is about to outgrow the cache."""
        while len(self.rows) > 1 and not self.runner.cache.fits(len(self.rows), max(r.length for r in self.rows)):
            request = self.rows.pop()
            request.retractions += 1
            self.waiting.appendleft(request)

    def _accept(self, requests: list[Request], logits: torch.Tensor) -> None:
        """Sample one token per request and apply the stop conditions."""
        requests = list(requests)
        self._forbid_early_stop(requests, logits)
        uniforms = [0.0 if r.params.greedy else r.random.random() for r in requests]
        tokens, logprobs = sample(logits, [r.params for r in requests], uniforms)
        chosen = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        for i, (request, token, logprob) in enumerate(zip(requests, tokens.tolist(), chosen, strict=True)):
            if request.limit == 0:  # only the prompt was to be scored
                self._finish(request, {"type": "length", "length": 0})
                continue
            request.output.append(token)
            request.logprobs.append(logprob)
            if request.top_logprobs_num:
                top = logprobs[i].topk(request.top_logprobs_num)
                pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
                request.top_logprobs.append([[value, index, None] for value, index in pairs])
            self.generated += 1
            if reason := self._stop_reason(request, token):
                self._finish(request, reason)
            elif request.stream:
                interval = request.params.stream_interval
                if interval is None:
                    interval = self.stream_interval
                if interval and (len(request.output) == 1 or len(request.output) - request.told >= interval):
                    self._announce(request)
        self._drop_finished()

    def _forbid_early_stop(self, requests: list[Request], logits: torch.Tensor) -> None:
        for i, request in enumerate(requests):
            if len(request.output) < request.params.min_new_tokens:
                stops = [t for t in self.eos | request.params.stop_token_ids if t < logits.shape[-1]]
                logits[i, stops] = float("-inf")

    def _stop_reason(self, request: Request, token: int) -> dict[str, Any] | None:
        params = request.params
        if not params.ignore_eos and (token in self.eos or token in params.stop_token_ids):
            return {"type": "stop", "matched": token}
        if (matched := self.text.matched_stop(request.output, params)) is not None:
            return {"type": "stop", "matched": matched}
        if len(request.output) >= request.limit:
            return {"type": "length", "length": len(request.output)}
        return None

    # --- bookkeeping ------------------------------------------------------------------------------------

    def _announce(self, request: Request) -> None:
        if request.stream and request.told < len(request.output):
            request.told = len(request.output)
            request.notify(request, Chunk(request.told, self.version))

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finish_reason = reason
        self.by_rid.pop(request.rid, None)
        request.notify(request, Chunk(len(request.output), self.version, reason))

    def _drop_finished(self) -> None:
        """Free the rows of finished requests; the last rows move into the holes."""
        i = 0
        while i < len(self.rows):
            if self.rows[i].finish_reason is None:
                i += 1
                continue
            last = self.rows.pop()
            if i < len(self.rows):
                if last.finish_reason is None:
                    self.runner.cache.move(len(self.rows), i, last.length)
                self.rows[i] = last

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges, by name; monotonic counters end in `_total`."""
        waiting = sum(isinstance(r, Request) for r in self.waiting)
        return {
            "num_running_reqs": len(self.rows),
            "num_queue_reqs": waiting,
            "generation_tokens_total": self.generated,
            "prompt_tokens_total": self.prefilled,
            "decode_steps_total": self.steps,
            "paused": int(self.paused is not None),
            "time": time.time(),
        }


def _settle(future: Future[Any], action: Callable[[], Any]) -> None:
    """Run `action` for whoever waits for `future`; not at all if they have gone before it was its turn."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except Exception as e:
        future.set_exception(e)
