"""One cell of `gpu_matrix.py`: a training run whose engines are compared after every update, with two losses.

Takes the flags of `miles-disagg train` after its own. With `--strikes`, a third into the run the process of the first
engine is killed, and two thirds into it the actor of the last one. Until the newcomer serves the current version, which
nobody publishes again, the gateway is asked for tokens of that version, and the other engines have to write them.
Prints one JSON object, last line of stdout; what a failed run came to is in it too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aiohttp
import psutil
import ray
from prove_run import Proof, outcome

from miles_disagg.cluster.assemble import running
from miles_disagg.cluster.fleet import Fleet, Member
from miles_disagg.cluster.run import Run
from miles_disagg.config.flags import parse_run
from miles_disagg.config.machine import Machine
from miles_disagg.config.resolve import resolve

BACK_SECONDS = 240.0
Strike = Callable[[Run, Member], Awaitable[None]]


class Cell(Proof):
    """The proof, with one engine killed and one replaced if `strikes`; `losses` says how each went."""

    def __init__(self, every: int, strikes: bool):
        super().__init__(every)
        self.strikes, self.losses = strikes, {}

    async def after_step(self, run: Run, step: int, served: dict[str, str]) -> None:
        """Strike a third and two thirds into the run."""
        steps = run.config.num_rollout or 0
        if not self.strikes or step + 1 not in (steps // 3, 2 * steps // 3):
            return
        assert isinstance(run.fleet, Fleet)
        if step + 1 == steps // 3:
            self.losses["killed"] = await outage(run, run.fleet.members[0], kill_process)
        else:
            self.losses["replaced"] = await outage(run, run.fleet.members[-1], kill_actor)
        await self.compare(run, served)


async def outage(run: Run, member: Member, strike: Strike) -> dict[str, Any]:
    """Strike, and see the others serve until the newcomer does. AssertionError where they do not, or it does not."""
    assert isinstance(run.fleet, Fleet)
    name, version = member.spec.replica_id, run.version
    others = {m.spec.replica_id for m in run.fleet.members if m is not member}
    begun, down, answers = time.monotonic(), False, 0
    await strike(run, member)
    while True:
        seconds = time.monotonic() - begun
        assert seconds < BACK_SECONDS, f"{name} was struck and is not back at version {version} after {seconds:.0f} s"
        rows = {row["replica_id"]: row for row in await run.fleet.status()}
        own = rows.get(name)
        if own is not None and own["ready"] and own["process_up"] and own["applied"] == version:
            if down:
                break
        elif own is None or not own["ready"] or not own["process_up"]:
            down = True
            if others:
                by = await answered(run.fleet.gateway_url, version)
                assert by in others, f"{name} is down, but {by} answered"
                answers += 1
        await asyncio.sleep(0.2)
    assert run.version == version, "a version was published meanwhile: the newcomer did not come by itself"
    assert answers or not others, f"nobody was asked while {name} was down"
    return {"engine": name, "back_s": round(seconds, 2), "version": version, "answers_of_others": answers}


async def answered(gateway: str, version: int) -> str:
    """The replica that wrote a few tokens at `version`. AssertionError if nobody does."""
    body = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 4, "temperature": 1.0},
        "weight_version": {"exact_version": version},
        "rid": uuid.uuid4().hex,
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as session:
        reply = await session.post(f"{gateway}/generate", json=body)
        answer = await reply.json()
        assert reply.status == 200, f"the other engines do not serve version {version}: {reply.status} {answer}"
        return answer["meta_info"]["replica_id"]


async def kill_process(run: Run, member: Member) -> None:
    """SIGKILL to the engine's server."""
    assert isinstance(run.fleet, Fleet)
    (row,) = [r for r in await run.fleet.status() if r["replica_id"] == member.spec.replica_id]
    port = str(urlparse(row["engine_url"]).port)
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if ("--port", port) in zip(words, words[1:], strict=False) and not any("guard.py" in word for word in words):
            found.append(process)
    assert found, f"no process of {member.spec.replica_id} with --port {port}"
    for process in found:
        process.kill()


async def kill_actor(run: Run, member: Member) -> None:
    """End the engine's actor, and with it its server; the fleet has to start another in its place."""
    ray.kill(member.actor, no_restart=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strikes", action="store_true", help="kill one engine and replace one on the way")
    parser.add_argument("--every", type=int, default=1, help="compare every N-th version, and the last")
    parser.add_argument("flags", nargs="*", help="after --: flags of a training run")
    args = parser.parse_args()
    config = resolve(parse_run(args.flags), Machine.local().gpus)
    cell, error, status = Cell(args.every, args.strikes), None, 1
    try:
        status = running(config, cell.train)
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    result = outcome(config, cell, status) | {"error": error, **cell.losses}
    print(json.dumps(result), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
