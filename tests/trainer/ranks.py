"""Starts real trainer ranks: one spawned process each, gloo between them, results back to the test.

Importing Megatron costs about 5 s, so ranks are forked from a server that has imported it once, and a test module
starts its ranks once and gives them a list of jobs.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import queue
import traceback
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from miles_disagg.config.machine import free_port
from miles_disagg.trainer.base import RankSpec

SCENARIOS = "tests.trainer.scenarios"


@dataclass(frozen=True)
class Job:
    """`tests.trainer.scenarios.<scenario>(rank=RankSpec, **arguments)` on every rank."""

    scenario: str
    arguments: dict[str, Any] = field(default_factory=dict)


def run_ranks(world_size: int, jobs: dict[str, Job], timeout: float = 240.0) -> dict[str, list[Any]]:
    """Results by job name and rank. The first exception on any rank ends all of them and fails the test.

    On a machine with CUDA every rank takes a GPU, and the test is skipped if there are too few.
    """
    if 0 < torch.cuda.device_count() < world_size:
        pytest.skip(f"{world_size} ranks need {world_size} GPUs (or a machine without any), here are too few")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([SCENARIOS])
    results: Any = context.Queue()
    ports = _different_ports(len(jobs))
    processes = [
        context.Process(target=_rank_main, args=(rank, world_size, ports, jobs, results), daemon=False)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    out: dict[str, list[Any]] = {name: [None] * world_size for name in jobs}
    try:
        for _ in range(world_size * len(jobs)):
            try:
                rank, name, ok, value = results.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(f"trainer ranks gave no result within {timeout} s") from None
            if not ok:
                raise AssertionError(f"rank {rank}, job {name}:\n{value}")
            out[name][rank] = value
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
    return out


def scenario(name: str, arguments: dict[str, Any]) -> None:
    """A scenario alone in a process of its own, which the test ends."""
    torch.set_num_threads(1)
    getattr(importlib.import_module(SCENARIOS), name)(**arguments)


def _different_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


def _rank_main(rank: int, world_size: int, ports: list[int], jobs: dict[str, Job], results: Any) -> None:
    torch.set_num_threads(1)
    scenarios = importlib.import_module(SCENARIOS)
    for port, (name, job) in zip(ports, jobs.items(), strict=True):
        spec = RankSpec(rank, world_size, "127.0.0.1", port, local_rank=rank)
        try:
            results.put((rank, name, True, getattr(scenarios, job.scenario)(rank=spec, **job.arguments)))
        except BaseException:
            results.put((rank, name, False, traceback.format_exc()))
            results.close()
            results.join_thread()
            os._exit(1)  # other ranks may hang in a collective: do not wait for them
