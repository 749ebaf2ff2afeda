"""Run as a script: an engine of two nodes on a Ray of fake nodes; prints what was seen, as one JSON object.

usage: multi_node.py DIRECTORY FLAG...   (each of the two rollout nodes pretends to have 2 GPUs)
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from miles_disagg.cluster.assemble import _claim, _rollout_side
from miles_disagg.cluster.fleet import Fleet
from miles_disagg.cluster.resume import Lineage
from miles_disagg.config.flags import parse_run
from miles_disagg.config.placement import plan_placement
from miles_disagg.config.resolve import resolve
from miles_disagg.domain.versions import VersionRef
from tests.fakes.sglang_node import starts


async def until(what: Any, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not await what():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


def node_of(actor: Any) -> str:
    return ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))


async def drive(directory: Path, flags: list[str]) -> dict[str, Any]:
    config = resolve(parse_run(flags), gpus=2)
    config.run_dir.mkdir(parents=True)
    said: list[str] = []
    out: dict[str, Any] = {"said": said}
    async with AsyncExitStack() as stack:
        ledger, _ = await _claim(config, "0" * 32, Lineage(config.run_dir), said.append, stack)
        fleet, _ = await _rollout_side(
            config, plan_placement(config), ledger, VersionRef(config.run_id, 0), said.append
        )
        assert isinstance(fleet, Fleet)
        stack.push_async_callback(fleet.stop)
        await fleet.start()
        (member,) = fleet.members
        out["nodes"] = [node_of(actor) for actor in (member.actor, *member.nodes)]
        out["ranks"] = member.num_ranks
        out["started"] = starts(directory)

        async def ready_after(count: int) -> bool:
            rows = await fleet.status()
            return len(starts(directory)) == count and [row["ready"] for row in rows] == [True]

        os.kill(out["started"][-1]["pid"], signal.SIGKILL)
        await until(lambda: ready_after(4))
        out["restarts"] = (await fleet.status())[0]["restarts"]
        ray.kill(member.nodes[0])
        await until(lambda: ready_after(6))
        out["again"] = starts(directory)[2:]
    return out


def main(directory: Path, flags: list[str]) -> dict[str, Any]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=4, num_gpus=2)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    try:
        return asyncio.run(drive(directory, flags))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
