"""The service as real processes, without Ray: versions, faults, lineages, proof of what is served."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.engine.tensors import serialize
from miles_disagg.store.base import open_store
from tests.fakes.publishing import FakeTrainer, step
from tests.fakes.service import Service, serves, steadily

Tensors = dict[str, torch.Tensor]


async def trainer_of(store: Path, base: Path, run_id: str) -> FakeTrainer:
    trainer = FakeTrainer(open_store(str(store)), base, run_id, ranks=1)
    for source in trainer.sources:
        source.source._companions = (base / "config.json", base / "tokenizer.json")
    await trainer.claim()
    return trainer


class Load:
    """Requests that each demand the newest version published when they are sent."""

    def __init__(self, service: Service, run_id: str):
        self.service, self.run_id, self.newest, self.stop = service, run_id, 0, asyncio.Event()
        self.task = asyncio.create_task(steadily(self.one, self.stop))

    async def one(self, i: int) -> dict[str, Any]:
        asked = self.newest
        wanted = {"min_version": asked}
        answer = await self.service.generate(f"{self.run_id}-{i}", self.run_id, weight_version=wanted)
        meta = answer["meta_info"]
        assert meta["run_id"] == self.run_id
        assert meta["id"] == f"{self.run_id}-{i}"
        assert all(version >= asked for _, version in meta["weight_version_spans"]), (asked, meta)
        assert len(answer["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
        return meta

    async def end(self) -> list[dict[str, Any]]:
        self.stop.set()
        return await self.task


@pytest.mark.long
async def test_replicas_die_and_join_while_versions_move_and_nothing_older_than_asked_is_served(
    tmp_path: Path, checkpoint: Path, tensors: Tensors
) -> None:
    trainer = await trainer_of(tmp_path / "store", checkpoint, "one")
    async with Service(tmp_path / "service", str(tmp_path / "store"), checkpoint) as service:
        await asyncio.gather(service.add("a"), service.add("b"))
        await service.until(serves("one", 0, "a", "b"))
        load = Load(service, "one")
        for version in range(1, 7):
            tensors = step(tensors, version)
            load.newest = (await trainer.publish(tensors)).ref.version
            if version == 2:
                service.kill("a")
            if version == 3:
                await service.add("c")
            await asyncio.sleep(0.5)
        await service.until(serves("one", 6, "b", "c"))
        seen = await load.end()
    assert {meta["replica_id"] for meta in seen} == {"a", "b", "c"}
    assert len({meta["id"] for meta in seen}) == len(seen)
    assert max(meta["weight_version"] for meta in seen) == 6


async def test_a_new_run_resets_the_fleet_and_runs_are_never_mixed(
    tmp_path: Path, checkpoint: Path, tensors: Tensors
) -> None:
    old = await trainer_of(tmp_path / "store", checkpoint, "old")
    async with Service(tmp_path / "service", str(tmp_path / "store"), checkpoint) as service:
        await service.add("a")
        for seed in range(3):
            tensors = step(tensors, seed)
            await old.publish(tensors)
        await service.until(serves("old", 3, "a"))
        load = Load(service, "old")
        await asyncio.sleep(0.5)
        await asyncio.gather(load.end(), old.ledger.release())
        await trainer_of(tmp_path / "store", checkpoint, "new")
        # the fleet may still be at old/3, whose number would do: the run decides
        first = await service.generate("first", "new", weight_version={"min_version": 0})
        assert (first["meta_info"]["run_id"], first["meta_info"]["weight_version"]) == ("new", 0)
        await service.until(serves("new", 0, "a"))


async def test_weights_corrupted_in_memory_are_found_refused_and_loaded_again(
    tmp_path: Path, checkpoint: Path, tensors: Tensors
) -> None:
    trainer = await trainer_of(tmp_path / "store", checkpoint, "run")
    async with Service(tmp_path / "service", str(tmp_path / "store"), checkpoint) as service:
        await service.add("a", "--verify-interval", "0.3")
        await service.until(lambda fleet: "a" in fleet and bool(fleet["a"]["fingerprint"]))
        first = (await service.fleet())["a"]["fingerprint"]
        await trainer.publish(step(tensors, 1))
        await service.until(
            lambda fleet: serves("run", 1, "a")(fleet) and fleet["a"]["fingerprint"] not in (None, first)
        )
        published = (await service.fleet())["a"]["fingerprint"]
        engine = SGLangEngine(service.engine_urls["a"])
        good = await engine.weights_digest()
        name = "model.norm.weight"
        spoiled = serialize([(name, tensors[name] + 1)])
        await engine.update_from_tensor([spoiled], load_format=None, version="run/weight_v000001", flush_cache=False)
        assert (await engine.weights_digest())[name] != good[name]
        log = service.replicas["a"].log
        await service.until(lambda _: "live weights are not the published run/weight_v000001" in log.read_text())
        await service.until(lambda fleet: serves("run", 1, "a")(fleet) and fleet["a"]["fingerprint"] == published)
        assert await engine.weights_digest() == good
        await engine.close()


@pytest.mark.long
async def test_a_gateway_that_restarts_and_a_replica_that_hangs_cost_time_and_nothing_else(
    tmp_path: Path, checkpoint: Path, tensors: Tensors
) -> None:
    trainer = await trainer_of(tmp_path / "store", checkpoint, "run")
    async with Service(tmp_path / "service", str(tmp_path / "store"), checkpoint) as service:
        await asyncio.gather(service.add("a"), service.add("b"))
        await service.until(serves("run", 0, "a", "b"))
        load = Load(service, "run")
        await asyncio.sleep(0.5)
        service.gateway.signal(signal.SIGKILL)
        await asyncio.sleep(0.5)
        await service.start_gateway()
        await service.until(serves("run", 0, "a", "b"))
        service.replicas["a"].signal(signal.SIGSTOP)
        load.newest = (await trainer.publish(step(tensors, 1))).ref.version
        await service.until(serves("run", 1, "b"))
        service.replicas["a"].signal(signal.SIGCONT)
        await service.until(serves("run", 1, "a", "b"))
        service.engines["b"].signal(signal.SIGKILL)  # its replica lives and refuses
        await service.until(lambda fleet: not fleet["b"]["ready"])
        seen = await load.end()
    assert len({meta["id"] for meta in seen}) == len(seen) > 0


@pytest.mark.long
async def test_with_relays_one_replica_reads_the_store_for_all_and_a_lost_one_is_passed_over(
    tmp_path: Path, checkpoint: Path, tensors: Tensors
) -> None:
    trainer = await trainer_of(tmp_path / "store", checkpoint, "run")
    async with Service(tmp_path / "service", str(tmp_path / "store"), checkpoint) as service:
        await asyncio.gather(*(service.add(name, "--relay") for name in "abc"))
        await service.until(serves("run", 0, *"abc"))
        before: dict[str, tuple[int, int]] = {}
        for version in range(1, 4):
            tensors = step(tensors, version)
            await trainer.publish(tensors)
            await service.until(serves("run", version, *"abc"))
            if version == 1:  # while replicas join, two of them may believe to be the first
                await asyncio.sleep(2.5)
                before = {name: await relayed_bytes(service, name) for name in "abc"}
        now = {name: await relayed_bytes(service, name) for name in "abc"}
        came = {name: (now[name][0] - before[name][0], now[name][1] - before[name][1]) for name in "abc"}
        assert sorted(origin > 0 for origin, _ in came.values()) == [False, False, True], came
        first = next(name for name, (origin, _) in came.items() if origin)
        assert all(peer == came[first][0] for name, (_, peer) in came.items() if name != first), came
        service.kill(first)
        left = "".join(sorted({*"abc"} - {first}))
        await trainer.publish(step(tensors, 9))
        await service.until(serves("run", 4, *left))
        log = "".join(service.replicas[name].log.read_text() for name in left)
        after = {name: await relayed_bytes(service, name) for name in left}
    assert sum(origin > 0 for origin, _ in after.values()) >= 1, "whoever is first now, or found it dead"
    assert "Traceback" not in log


async def relayed_bytes(service: Service, name: str) -> tuple[int, int]:
    """Bytes of version files that a replica had from the store, and from peers."""
    url = (await service.fleet())[name]["url"]
    async with service.client.get(f"{url}/metrics") as response:
        lines = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
    keys = (f'miles_replica_relay_from_{source}_bytes_total{{replica_id="{name}"}}' for source in ("origin", "peer"))
    origin, peer = (int(float(lines[key])) for key in keys)
    return origin, peer


async def test_a_replica_held_for_an_evaluation_stays_while_the_others_move_on(
    tmp_path: Path, checkpoint: Path, tensors: Tensors
) -> None:
    trainer = await trainer_of(tmp_path / "store", checkpoint, "run")
    async with Service(tmp_path / "service", str(tmp_path / "store"), checkpoint) as service:
        await asyncio.gather(service.add("a"), service.add("b"))
        await trainer.publish(step(tensors, 1))
        await service.until(serves("run", 1, "a", "b"))

        async def post(path: str, **body: Any) -> tuple[int, dict[str, Any]]:
            async with service.client.post(f"{service.url}/{path}", json=body) as response:
                return response.status, await response.json()

        assert (await post("hold", version=0))[0] == 410
        assert (await post("hold", version=5))[0] == 409
        assert (await post("hold", version="1"))[0] == (await post("hold", seconds=0))[0] == 400
        assert (await post("hold", replica_id="nobody"))[0] == 404
        status, answer = await post("hold", version=1, seconds=120)
        assert (status, answer["held"]) == (200, "run/weight_v000001")
        held = answer["replica_id"]
        other = "b" if held == "a" else "a"
        for seed in (2, 3):
            await trainer.publish(step(tensors, seed))
        await service.until(lambda fleet: fleet[other]["applied"] == 3)
        await service.until(lambda fleet: (fleet[held]["applied"], fleet[held]["held"]) == (1, answer["held"]))
        for i in range(4):
            pinned = await service.generate(f"e{i}", "run", weight_version={"exact_version": 1})
            assert pinned["meta_info"]["weight_version_spans"] == [[0, 1]]
            assert pinned["meta_info"]["replica_id"] == held
            newest = await service.generate(f"t{i}", "run", weight_version={"min_version": 3})
            assert newest["meta_info"]["replica_id"] == other
        assert (await post("release", replica_id=held))[0] == 200
        await service.until(serves("run", 3, "a", "b"))
        await service.until(lambda fleet: fleet[held]["held"] is None)
        body = {"input_ids": [1], "rid": "late", "weight_version": {"exact_version": 1}, "sampling_params": {}}
        assert (await post("generate", **body))[0] == 410


async def test_a_replica_whose_canary_answer_is_not_the_others_is_refused(
    tmp_path: Path, checkpoint: Path, tensors: Tensors
) -> None:
    await trainer_of(tmp_path / "store", checkpoint, "run")
    flags = ("--canary-ids", "1", "2", "3", "--canary-interval", "0.5")
    root = tmp_path / "service"
    async with Service(root, str(tmp_path / "store"), checkpoint, gateway_flags=flags) as service:
        await asyncio.gather(*(service.add(name, "--verify-interval", "3600") for name in "abc"))
        # Only when its own proof is done, which comes once in this test: it would heal the replica.
        proven = serves("run", 0, *"abc")
        await service.until(lambda fleet: proven(fleet) and all(fleet[name]["fingerprint"] for name in "abc"))
        engine = SGLangEngine(service.engine_urls["b"])
        name = "model.norm.weight"
        spoiled = serialize([(name, -tensors[name])])
        await engine.update_from_tensor([spoiled], load_format=None, version="run/weight_v000000", flush_cache=False)
        await service.until(lambda fleet: not fleet["b"]["ready"] and "canary prompt" in fleet["b"]["reason"])
        for i in range(6):
            answer = await service.generate(f"r{i}", "run", weight_version={"min_version": 0})
            assert answer["meta_info"]["replica_id"] != "b"
        await engine.close()
