"""Relays: real files over real HTTP between replicas. Peers die, stall, lie; what arrives is what was published."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from miles_disagg.domain.errors import ChecksumMismatch
from miles_disagg.replica import app as replica_app
from miles_disagg.replica.relay_links import RelayedStore
from miles_disagg.replica.server import HttpServer
from miles_disagg.store.base import open_store
from miles_disagg.store.local import LocalStore
from miles_disagg.store.publication import file_proofs
from miles_disagg.store.versions import VersionStore
from tests.fakes.engine import FakeEngine
from tests.fakes.publishing import FakeTrainer, step, tiny_tensors, write_base
from tests.fakes.replica import RUN, make_replica, ref

KEY = f"{ref(1)}/model-00000-of-00001.safetensors"


class CountingStore(LocalStore):
    """Counts the payload files that are read from it; `gate` holds them up."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.reads: list[str] = []

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        self.reads.append(key)
        return super().get_range(key, begin, end)


class Hosts:
    """Replicas that relay, on one store each of their own that counts."""

    def __init__(self, root: Path, stack: AsyncExitStack):
        self.root, self._stack = root, stack

    async def add(self, name: str, *, block: int = 1 << 20, stall: float = 1.0) -> tuple[RelayedStore, str, list[str]]:
        """A host: its store behind the relay, its URL, the payload keys it read from the origin."""
        origin = CountingStore(self.root / "store")
        store = RelayedStore(origin, self.root / f"{name}.relay", name)
        store.relay.settings = replace(store.relay.settings, block=block, stall=stall, settle=0.5)
        replica = make_replica(FakeEngine(str(ref(0))))
        server = await replica_app.serve(replica, relay=store)
        self._stack.push_async_callback(server.stop)
        return store, server.url, origin.reads

    def payload(self) -> bytes:
        return (self.root / "store" / KEY).read_bytes()


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[Hosts]:
    tensors = tiny_tensors(size=256)
    write_base(tmp_path / "base", tensors)
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), tmp_path / "base", RUN, ranks=1)
    await trainer.claim()
    await trainer.publish(step(tensors, 1, 0.5))
    async with AsyncExitStack() as stack:
        yield Hosts(tmp_path, stack)


async def get(store: RelayedStore, path: Path) -> bytes:
    size = await asyncio.to_thread(store.download, KEY, path)
    data = path.read_bytes()
    assert size == len(data)
    return data


@asynccontextmanager
async def peer(answer: Callable[[web.Request], object]) -> AsyncIterator[str]:
    """A relay that answers as told."""
    app = web.Application()
    app.router.add_get("/relay/{key:.+}", answer)  # type: ignore[arg-type]
    server = await HttpServer.start(app)
    try:
        yield server.url
    finally:
        await server.stop()


async def test_a_publication_says_what_its_files_are(hosts: Hosts) -> None:
    index = VersionStore(open_store(str(hosts.root / "store"))).index(ref(1))
    assert index is not None
    proof = file_proofs(index.raw)["model-00000-of-00001.safetensors"]
    assert proof.nbytes == len(hosts.payload())


async def test_a_chain_of_hosts_reads_once_from_the_origin(hosts: Hosts, tmp_path: Path) -> None:
    block = 4096
    assert len(hosts.payload()) > 4 * block
    above: tuple[str, ...] = ()
    stores, reads = [], []
    for i in range(5):
        store, url, read = await hosts.add(f"h{i}", block=block)
        store.relay.follow(above)
        above = (url, *above)[:2]
        stores.append(store)
        reads.append(read)
    got = await asyncio.gather(*(get(store, tmp_path / f"out-{i}") for i, store in enumerate(reversed(stores))))
    assert set(got) == {hosts.payload()}
    assert [len(read) for read in reads] == [1, 0, 0, 0, 0]
    assert [store.relay.totals["from_origin_bytes"] > 0 for store in stores] == [True, False, False, False, False]
    assert all(store.relay.totals["from_peer_bytes"] == len(hosts.payload()) for store in stores[1:])


async def test_what_was_fetched_is_passed_on_and_not_fetched_again(hosts: Hosts, tmp_path: Path) -> None:
    top, url, reads = await hosts.add("top")
    top.relay.follow(())
    first = await get(top, tmp_path / "top")
    for i in range(3):
        below, _, none = await hosts.add(f"below-{i}")
        below.relay.follow((url,))
        assert await get(below, tmp_path / f"out-{i}") == first
        assert none == []
    assert reads == [KEY]


async def test_a_dead_peer_is_passed_over_and_the_one_above_it_asked(hosts: Hosts, tmp_path: Path, caplog) -> None:
    top, url, _ = await hosts.add("top")
    top.relay.follow(())
    below, _, reads = await hosts.add("below")
    below.relay.follow(("http://127.0.0.1:9", url))
    assert await get(below, tmp_path / "out") == hosts.payload()
    assert reads == []
    assert "from http://127.0.0.1:9: " in caplog.text


@pytest.mark.parametrize("lie", ["other bytes", "too short", "too long", "404"])
async def test_a_peer_that_lies_is_found_out_and_the_origin_asked(
    hosts: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    body = {
        "other bytes": os.urandom(len(hosts.payload())),
        "too short": hosts.payload()[:-10],
        "too long": hosts.payload() + b"more",
        "404": b"",
    }[lie]

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, status=404 if lie == "404" else 200)

    async with peer(answer) as url:
        below, _, reads = await hosts.add("below")
        below.relay.follow((url,))
        assert await get(below, tmp_path / "out") == hosts.payload()
    assert reads == [KEY]
    says = {"other bytes": "published as", "too short": "broke off after", "too long": "more than the published"}
    assert says.get(lie, "status 404") in caplog.text


async def test_a_silent_peer_costs_seconds_and_a_slow_one_too(hosts: Hosts, tmp_path: Path, caplog) -> None:
    data = hosts.payload()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for i in range(0, len(data), 100):
            await response.write(data[i : i + 100])
            await asyncio.sleep(3600 if slow == "silent" else 0.05)
        return response

    async with peer(answer) as url:
        for slow in ("silent", "slow"):
            below, _, reads = await hosts.add(slow, stall=0.5)
            below.relay.follow((url,))
            assert await get(below, tmp_path / slow) == data
            assert reads == [KEY]
    assert "waited 0.5 s for more than 100 bytes" in caplog.text
    assert "bytes a second are too few" in caplog.text


async def test_nobody_below_a_lying_peer_gets_its_bytes(hosts: Hosts, tmp_path: Path) -> None:
    wrong = os.urandom(len(hosts.payload()))

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for i in range(0, len(wrong), 4096):
            await response.write(wrong[i : i + 4096])
            await asyncio.sleep(0.005)
        return response

    async with peer(answer) as url:
        middle, middle_url, middle_reads = await hosts.add("middle", block=4096)
        middle.relay.follow((url,))
        below = [await hosts.add(f"below-{i}", block=4096) for i in range(3)]
        for store, _, _ in below:
            store.relay.follow((middle_url, url))
        stores = [middle, *(store for store, _, _ in below)]
        got = await asyncio.gather(*(get(store, tmp_path / f"out-{i}") for i, store in enumerate(stores)))
    assert set(got) == {hosts.payload()}
    assert middle_reads == [KEY]
    assert all(reads == [] for _, _, reads in below), "they ask the host above them once more"


async def test_damage_in_the_store_itself_is_an_error_everywhere(hosts: Hosts, tmp_path: Path) -> None:
    path = hosts.root / "store" / KEY
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    top, url, _ = await hosts.add("top")
    top.relay.follow(())
    below, _, reads = await hosts.add("below")
    below.relay.follow((url,))
    for store in (below, top):
        with pytest.raises(ChecksumMismatch):
            await get(store, tmp_path / "out")
    assert reads == [KEY]


async def test_a_replica_without_word_from_a_gateway_asks_the_origin(hosts: Hosts, tmp_path: Path) -> None:
    alone, _, reads = await hosts.add("alone")
    assert await get(alone, tmp_path / "out") == hosts.payload()
    assert reads == [KEY]


async def test_a_relay_gives_only_published_payload_files(hosts: Hosts) -> None:
    _, url, _ = await hosts.add("top")
    async with aiohttp.ClientSession() as client:
        for key, status in (
            (f"{RUN}/run.json", 404),
            (f"{ref(1)}/model.safetensors.index.json", 404),
            (f"{ref(9)}/model-00000-of-00001.safetensors", 404),
            ("run/%2e%2e/%2e%2e/etc/passwd", 400),
            ("%2Fetc/passwd", 400),
            (KEY, 200),
        ):
            async with client.get(URL(f"{url}/relay/{key}", encoded=True)) as response:
                assert response.status == status, key
