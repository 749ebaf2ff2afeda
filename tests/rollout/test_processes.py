"""An engine of several nodes: its processes are started with one meeting point, looked at and ended together."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from miles_disagg.domain.errors import EngineStartError, PortTaken
from miles_disagg.domain.versions import VersionRef
from miles_disagg.rollout.processes import EngineCommand, EngineProcesses, NodeServer
from tests.fakes.sglang_node import as_python, starts

BASE = VersionRef("run", 0)


def processes_of(tmp_path: Path, nodes: int = 3, timeout: float = 30.0) -> EngineProcesses:
    python = str(as_python(tmp_path))
    command = EngineCommand("sglang", "/model", "cuda", tmp_path / "engine-0.log", python, ranks=8)
    return EngineProcesses(command, BASE, timeout, [NodeServer() for _ in range(nodes - 1)])


def value(row: dict, flag: str) -> str:
    return row["argv"][row["argv"].index(flag) + 1]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_ended(engine: EngineProcesses) -> str:
    deadline = time.monotonic() + 20
    while (reason := await engine.ended()) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    return reason


async def test_every_node_starts_its_rank_of_one_engine_and_one_death_is_the_death_of_all(tmp_path: Path):
    engine = processes_of(tmp_path)
    try:
        url = await engine.start()
        rows = sorted(starts(tmp_path), key=lambda row: row["rank"])
        assert [value(row, "--node-rank") for row in rows] == ["0", "1", "2"]
        assert {value(row, "--nnodes") for row in rows} == {"3"}
        assert {value(row, "--tp-size") for row in rows} == {"8"}
        assert len({value(row, "--dist-init-addr") for row in rows}) == 1
        assert len({value(row, "--port") for row in rows}) == 3
        assert await engine.ended() is None
        os.kill(rows[2]["pid"], signal.SIGKILL)
        assert "node 2 of 3 ended with status" in await until_ended(engine)
        await engine.stop()
        assert not any(alive(row["pid"]) for row in rows), "the others were left running"
        assert await engine.start() == url
        again = starts(tmp_path)[3:]
        assert sorted(row["rank"] for row in again) == [0, 1, 2]
    finally:
        await engine.stop()
    assert not any(alive(row["pid"]) for row in starts(tmp_path))
    assert {p.name for p in tmp_path.glob("*.log")} == {"engine-0.log", "engine-0-node-1.log", "engine-0-node-2.log"}


async def test_a_rank_that_ends_at_start_is_said_with_its_last_lines(tmp_path: Path):
    (tmp_path / "fail-1").touch()
    engine = processes_of(tmp_path, nodes=2)
    try:
        with pytest.raises(EngineStartError, match=r"node 1 of 2 ended with status 7[\s\S]*rank 1 cannot go on"):
            await engine.start()
    finally:
        await engine.stop()
    assert not any(alive(row["pid"]) for row in starts(tmp_path))


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_port_that_somebody_else_has_is_seen_at_once_and_all_start_again_on_others(tmp_path: Path, rank: int):
    (tmp_path / f"taken-{rank}").write_text("x")
    engine = processes_of(tmp_path, nodes=2, timeout=60.0)
    begun = time.monotonic()
    try:
        url = await engine.start()
        assert time.monotonic() - begun < 30, "it was found by the deadline only"
        last = starts(tmp_path)[-1]
        again = [row for row in starts(tmp_path) if value(row, "--dist-init-addr") == value(last, "--dist-init-addr")]
        first = [row for row in starts(tmp_path) if row not in again]  # one may have been ended before it said so
        assert sorted(row["rank"] for row in again) == [0, 1]
        assert rank in [row["rank"] for row in first]
        assert not any(alive(row["pid"]) for row in first)
        assert {value(row, "--port") for row in first}.isdisjoint(value(row, "--port") for row in again)
        assert url.endswith(value(min(again, key=lambda row: row["rank"]), "--port"))
        assert await engine.ended() is None
    finally:
        await engine.stop()


async def test_ports_that_are_always_taken_end_the_start_with_what_was_said_and_leave_nothing(tmp_path: Path):
    (tmp_path / "taken-1").write_text("x" * 9)
    engine = processes_of(tmp_path, nodes=2, timeout=60.0)
    with pytest.raises(PortTaken, match=r"node 1 of 2 found a port in use[\s\S]*address already in use"):
        await engine.start()
    assert [row["rank"] for row in starts(tmp_path)].count(1) == 3
    assert not any(alive(row["pid"]) for row in starts(tmp_path))


async def test_a_directory_that_a_node_does_not_see_is_told_by_its_rank(tmp_path: Path):
    engine = processes_of(tmp_path, nodes=2)
    assert await engine.blind_to(tmp_path) == []
    assert await engine.blind_to(tmp_path / "nowhere") == [1]
