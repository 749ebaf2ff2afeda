"""A canary prompt: every replica answers it greedily at each version; one that answers unlike the others is refused.

For engines whose weights cannot be digested, and as a second proof for those that can: what is compared is what a
request would get. Replicas at one version of one run must agree; who is refused is decided by the majority, so two that
disagree are only reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from miles_disagg.gateway.router import Member, Router

log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.25
_ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class CanarySettings:
    """prompt: token ids; tokens: how many are generated. interval: seconds between questions to one replica, which is
    also asked at each new version. tolerance: difference of log-probabilities that other hardware explains."""

    prompt: tuple[int, ...]
    interval: float = 60.0
    tokens: int = 8
    tolerance: float = 0.05


def canary_of(ids: Sequence[int] | None, interval: float | None) -> CanarySettings | None:
    """The flags' values as settings; None where no prompt is given."""
    return CanarySettings(tuple(ids), interval or CanarySettings.interval) if ids else None


@dataclass(frozen=True)
class Song:
    """What a replica answered: tokens and their log-probabilities, at a version of a run."""

    run_id: str
    version: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def agrees(self, other: Song, tolerance: float) -> bool:
        """Same tokens with the same log-probabilities, as far as they go on alike; a tie may fall either way."""
        for mine, theirs, p, q in zip(self.tokens, other.tokens, self.logprobs, other.logprobs, strict=False):
            if abs(p - q) > tolerance:
                return False
            if mine != theirs:
                break
        return True


class Canary:
    """Asks the members of `router` and tells it whom to refuse."""

    def __init__(self, router: Router, settings: CanarySettings):
        self._router, self._settings = router, settings
        self._songs: dict[str, Song] = {}
        self._asked: dict[str, float] = {}

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            members = {m.replica_id: m for m in self._router.members if m.says_ready}
            self._songs = {name: song for name, song in self._songs.items() if name in members}
            due = [m for m in members.values() if self._due(m)]
            if due:
                await asyncio.gather(*(self._ask(session, m) for m in due))
                self._judge(members)

    def _due(self, member: Member) -> bool:
        song = self._songs.get(member.replica_id)
        if member.applied is None or member.run_id is None:
            return False
        if song is None or (song.run_id, song.version) != (member.run_id, member.applied):
            return time.monotonic() - self._asked.get(member.replica_id, -1e9) > 1.0
        return time.monotonic() - self._asked[member.replica_id] > self._settings.interval

    async def _ask(self, session: aiohttp.ClientSession, member: Member) -> None:
        """Greedy, and for exactly the version that it says it serves. No answer proves nothing."""
        self._asked[member.replica_id] = time.monotonic()
        assert member.run_id is not None
        assert member.applied is not None
        body = {
            "input_ids": list(self._settings.prompt),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": self._settings.tokens, "ignore_eos": True},
            "return_logprob": True,
            "rid": f"canary-{uuid.uuid4().hex}",
            "weight_version": {"exact_version": member.applied},
        }
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            async with session.post(f"{member.url}/generate", json=body, timeout=timeout) as response:
                if response.status != 200:
                    return
                answer: dict[str, Any] = await response.json()
            meta = answer["meta_info"]
            logprobs = tuple(float(entry[0]) for entry in meta["output_token_logprobs"])
            run_id, version = meta["run_id"], int(meta["weight_version_start"])
            self._songs[member.replica_id] = Song(run_id, version, tuple(answer["output_ids"]), logprobs)

    def _judge(self, members: dict[str, Member]) -> None:
        groups: dict[tuple[str, int], list[str]] = {}
        for name, song in self._songs.items():
            groups.setdefault((song.run_id, song.version), []).append(name)
        for (run_id, version), names in groups.items():
            wrong = odd_ones_out([self._songs[name] for name in names], self._settings.tolerance)
            if wrong is None:
                log.warning("replicas %s answer the canary differently at %s version %d", names, run_id, version)
                continue
            says = f"its answer to the canary prompt at version {version} is not the others'"
            for name, is_wrong in zip(names, wrong, strict=True):
                reason = says if is_wrong else None
                if reason and members[name].canary is None:
                    log.error("replica %s is refused: %s", name, reason)
                self._router.set_canary(members[name], (run_id, version, reason) if reason else None)


def odd_ones_out(songs: Sequence[Song], tolerance: float) -> list[bool] | None:
    """Whose answer is not the majority's; None if there are several answers and none has a majority."""
    agreeing = [sum(a.agrees(b, tolerance) for b in songs) for a in songs]
    best = max(range(len(songs)), key=lambda i: agreeing[i])
    if 2 * agreeing[best] <= len(songs):
        return None
    return [not song.agrees(songs[best], tolerance) for song in songs]
