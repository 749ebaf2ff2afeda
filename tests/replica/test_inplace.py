"""Versions scattered in place equal the checkpoint they stand for, bit for bit: embedded engine and stock SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_disagg.config.machine import free_port
from miles_disagg.domain.errors import UpdateFailed, WeightsNotLoaded
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine import launch
from miles_disagg.engine.inplace import HOOK
from miles_disagg.engine.launch import EngineProcess
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.engine.tensors import serialize
from miles_disagg.replica.base import Materialized
from miles_disagg.replica.inplace import InPlaceLoader, InPlaceUnavailable, Plugin
from miles_disagg.replica.replica import Replica, ReplicaSettings
from miles_disagg.weights.checkpoint import open_checkpoint
from miles_disagg.weights.digest import digest
from miles_disagg.weights.dtypes import unsigned
from miles_disagg.weights.indices import POSITIONS, VALUES
from miles_disagg.weights.safetensors_file import ShardSpool
from tests.engine import sglang_env
from tests.engine.checkpoints import make_checkpoint
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import ref, request

PROMPT = [10, 20, 30, 40]


@dataclass
class Staging:
    """A checkpoint on this host that is patched version by version, as the stager does it."""

    path: Path
    seed: int = 0
    version: int = 0

    def next(self, share: float = 0.01) -> Materialized:
        """Change a share of every tensor's elements; what a stager hands over."""
        rng = np.random.default_rng(self.seed + self.version)
        before, self.version = ref(self.version), self.version + 1
        patch = self.path.parent / f"patch-{self.version:06d}.safetensors"
        spool = ShardSpool(patch.parent)
        with open_checkpoint(self.path, writable=True) as checkpoint:
            for name, info in checkpoint.tensors.items():
                whole = checkpoint.bytes(name).view(unsigned(info.dtype))
                positions = np.flatnonzero(rng.random(whole.size) < share).astype("<i4")
                values = whole[rng.permutation(whole.size)[: positions.size]] ^ 1
                whole[positions] = values
                spool.write(positions.data.cast("B"))
                spool.commit(name + POSITIONS, "I32", positions.shape)
                spool.write(values.data.cast("B"))
                spool.commit(name + VALUES, info.dtype, values.shape)
            checkpoint.sync()
        spool.finish(patch.name, {})
        spool.close()
        return Materialized(ref(self.version), self.path, before, patch)


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(make_checkpoint(tmp_path / "weights", seed=0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "v0", seed=0)


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def engine_url(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    where: dict[str, Any] = {"port": free_port(), "device": "cpu", "weight_version": str(ref(0))}
    if request.param == "sglang":
        spec = launch.sglang(base, python=sglang_env.python(), args=["--dtype", "float32"], **where)
    else:
        spec = launch.embedded(base, **where)
    process = EngineProcess.start(spec, tmp_path_factory.mktemp("engine") / "engine.log")
    try:
        asyncio.run(process.wait_ready(240.0))
        yield process.url
        assert process.exit_code is None, process.log_tail()
    finally:
        asyncio.run(process.stop())


@pytest.fixture
async def engine(engine_url: str, base: Path) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(engine_url)
    await engine.resume()
    await engine.update_from_disk(str(base), str(ref(0)), flush_cache=False)
    yield engine
    await engine.abort()
    await engine.close()


async def attached(engine: SGLangEngine, staging: Staging, **options: Any) -> tuple[Replica, InPlaceLoader]:
    loader = InPlaceLoader(engine, staging.path, **options)
    await loader.open(ref(0))
    replica = Replica(ReplicaSettings("replica-0"), engine, loader=loader)
    assert await replica.attach("run") == ref(0)
    return replica, loader


async def served(loader: InPlaceLoader, path: Path) -> dict[str, int]:
    answers = await loader.plugin.ask("compare", directory=str(path))  # of every rank
    assert sum(answer["elements"] for answer in answers) > 100_000
    return {name: count for answer in answers for name, count in answer["wrong"].items()}


async def fresh(engine: SGLangEngine, n: int = 24) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs, from no cached prefix."""
    params = {"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "extra_key": uuid.uuid4().hex}
    answer = await engine.generate(body)
    return answer["output_ids"], [row[0] for row in answer["meta_info"]["output_token_logprobs"]]


async def test_a_hundred_versions_in_place_equal_a_full_reload(engine: SGLangEngine, staging: Staging) -> None:
    replica, loader = await attached(engine, staging, verify_every=10)
    for _ in range(100):
        await replica.activate(staging.next())
    assert await served(loader, staging.path) == {}
    assert (loader.scattered, loader.reloaded) == (100, [])
    assert replica.applied == ref(100)
    in_place = await fresh(engine)
    await engine.update_from_disk(str(staging.path), str(ref(100)), flush_cache=False)
    assert in_place == await fresh(engine)
    assert (await loader.plugin.ask("verify"))[0]["same"], "the reload changed a bit"
    await replica.close()


async def test_digests_of_what_is_served_are_the_checkpoints(engine: SGLangEngine, staging: Staging) -> None:
    replica, loader = await attached(engine, staging)
    await replica.activate(staging.next(0.2))
    with open_checkpoint(staging.path) as checkpoint:
        expected = {name: digest(checkpoint.bytes(name), "xxh3-128") for name in checkpoint.tensors}
    assert await loader.plugin.digests(staging.path) == expected
    await replica.close()


async def test_requests_in_flight_go_on_over_a_scatter(engine: SGLangEngine, staging: Staging) -> None:
    replica, loader = await attached(engine, staging)
    params = {"max_new_tokens": 200, "temperature": 0.0, "ignore_eos": True}
    asked = [request(f"r{i}", input_ids=[i + 1, 2, 3], sampling_params=params, stream=True) for i in range(4)]
    work = [asyncio.create_task(replica.sessions.result(one)) for one in asked]
    while sum(f.tokens >= 20 for f in replica.gate.flights()) < 4:
        await asyncio.sleep(0.005)
    await replica.activate(staging.next(0.1))
    for answer in await asyncio.gather(*work):
        assert [v for _, v in answer["meta_info"]["weight_version_spans"]] == [0, 1]
        assert answer["meta_info"]["completion_tokens"] == 200
    assert (loader.scattered, await served(loader, staging.path)) == (1, {})
    await replica.close()


async def test_what_has_no_patch_is_reloaded_and_the_next_one_is_in_place_again(
    engine: SGLangEngine, staging: Staging
) -> None:
    replica, loader = await attached(engine, staging)
    await replica.activate(staging.next())
    skipped, target = staging.next(), staging.next()
    await replica.activate(target)  # its patch starts from the version that was skipped
    assert skipped.ref == target.previous
    assert [r for r, _ in loader.reloaded] == [target.ref]
    await replica.activate(staging.next())
    assert loader.scattered == 2
    assert await served(loader, staging.path) == {}
    await replica.close()


async def test_a_patch_that_does_not_fit_is_reloaded_and_the_server_lives(
    engine: SGLangEngine, staging: Staging, tmp_path: Path
) -> None:
    replica, loader = await attached(engine, staging)
    good = staging.next()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not a safetensor")
    await replica.activate(Materialized(good.ref, good.path, good.previous, broken))
    assert (loader.scattered, len(loader.reloaded)) == (0, 1)
    assert replica.applied == good.ref
    assert await served(loader, staging.path) == {}
    await replica.close()


async def test_weights_changed_behind_its_back_are_found_by_the_fingerprint(
    engine: SGLangEngine, staging: Staging, tmp_path: Path
) -> None:
    replica, loader = await attached(engine, staging, verify_every=2)
    await replica.activate(staging.next())
    other = make_checkpoint(tmp_path / "other", seed=9)
    await engine.pause("in_place")
    await engine.update_from_disk(str(other), str(ref(1)), flush_cache=False)
    await engine.resume()
    await replica.activate(staging.next())
    assert "fingerprint" in loader.reloaded[-1][1]
    assert await served(loader, staging.path) == {}
    await replica.close()


async def test_a_scatter_that_was_never_staged_fails_and_heals_by_a_reload(
    engine: SGLangEngine, staging: Staging
) -> None:
    replica, loader = await attached(engine, staging)
    target = staging.next()
    await loader.stage(target)
    await loader.plugin.ask("discard")
    await engine.pause("in_place")
    await loader.load(engine, target)
    await engine.resume()
    assert "not staged" in loader.reloaded[-1][1]
    assert await served(loader, staging.path) == {}
    await replica.close()


async def test_a_checkpoint_of_another_model_cannot_be_mapped(
    engine: SGLangEngine, staging: Staging, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "wide", hidden_size=96)
    loader = InPlaceLoader(engine, other)
    with pytest.raises(InPlaceUnavailable):
        await loader.open(VersionRef("run", 0))
    same_shape = make_checkpoint(tmp_path / "other", seed=5)
    with pytest.raises(InPlaceUnavailable, match="not where its map says"):
        await InPlaceLoader(engine, same_shape).open(ref(0))
    await engine.update_from_disk(str(staging.path), str(ref(0)), flush_cache=False)


async def test_a_weight_that_no_tensor_reaches_is_refused_by_name(
    engine: SGLangEngine, staging: Staging, tmp_path: Path
) -> None:
    short, name = tmp_path / "short", "model.layers.1.self_attn.o_proj.weight"
    shutil.copytree(staging.path, short)
    tensors = load_file(short / "model.safetensors")
    del tensors[name]
    save_file(tensors, short / "model.safetensors", {"format": "pt"})
    loader = InPlaceLoader(engine, short)
    with pytest.raises(WeightsNotLoaded, match=f"no tensor of {short} is loaded into the engine's {name}, so"):
        await loader.open(ref(0))
    loader.plugin.close()


class Ranks(Plugin):
    """A plugin whose ranks answer `status` with what they have not reached."""

    def __init__(self, *unreached: list[str]):
        super().__init__(FakeEngine(str(ref(0))))
        self.rows = [{"ok": True, "unreached": names} for names in unreached]

    async def check(self) -> dict[str, Any]:
        return {"tp_size": len(self.rows), "weight_version": str(ref(0))}

    async def _hook(self, request: Mapping[str, Any], version: str) -> None:
        (Path(request["directory"]) / "rank-0.sock").touch()

    async def ask(self, op: str, **fields: Any) -> list[dict[str, Any]]:
        return self.rows


async def test_a_rank_may_hold_nothing_but_padding_where_another_has_the_tensor(tmp_path: Path) -> None:
    plugin = Ranks([], ["embed"])
    assert (await plugin.open(tmp_path))["ranks"] == 2
    plugin.close()
    nobody = Ranks(["head"], ["embed", "head"])
    with pytest.raises(WeightsNotLoaded, match="the engine's head, so"):
        await nobody.open(tmp_path)
    nobody.close()


async def test_an_unusable_request_does_not_kill_the_server(engine: SGLangEngine, staging: Staging) -> None:
    for raw in (b"{", b'{"op": "commit", "id": "x"}', b'{"op": "open", "directory": "/nowhere", "checkpoint": "/no"}'):
        payload = serialize([("request", torch.tensor(list(raw), dtype=torch.uint8))])
        with contextlib.suppress(UpdateFailed):
            await engine.update_from_tensor([payload], load_format=HOOK, version=str(ref(0)), flush_cache=False)
    assert len((await fresh(engine))[0]) == 24


class EngineElsewhere(FakeEngine):
    """Loads the plugin, but in a file system of its own: what it opens is not seen here."""

    async def server_info(self) -> dict[str, Any]:
        return {**await super().server_info(), "custom_weight_loader": [HOOK]}


async def test_an_engine_on_another_host_is_refused_with_the_reason(staging: Staging) -> None:
    loader = InPlaceLoader(EngineElsewhere(str(ref(0))), staging.path)
    with pytest.raises(InPlaceUnavailable, match="opened no session .* runs on another host than its replica"):
        await loader.open(ref(0))
    loader.plugin.close()
