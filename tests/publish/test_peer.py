"""Peer-to-peer transfers between sharded ranks: NIXL over host memory, and gloo; no process but this one."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from miles_disagg.config.machine import free_port
from miles_disagg.domain.errors import DeadlineExceeded, NonFiniteWeights, PublicationFailed
from miles_disagg.engine.inplace.miles_inplace import transport
from miles_disagg.engine.inplace.miles_inplace.transport import Job, Nixl, Pairs, TransportError, region
from miles_disagg.publish.peer import Route
from miles_disagg.weights.transfer.layouts import (
    EngineParallel,
    ModelSizes,
    TrainerParallel,
    engine_layouts,
    trainer_layouts,
)
from miles_disagg.weights.transfer.link import GroupSeat
from miles_disagg.weights.transfer.report import summary
from tests.fakes.nixl import StuckApi
from tests.fakes.sharded import Pair, random_tensors

DENSE = ModelSizes(vocab=101, hidden=32, ffn=64, layers=2, heads=4, kv_heads=2, head_dim=8)
EXPERTS = ModelSizes(
    vocab=101, hidden=32, ffn=64, layers=2, heads=4, kv_heads=2, head_dim=8, experts=4, expert_ffn=16, tied=True
)
Make = Callable[..., Pair]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    pairs: list[Pair] = []

    def build(model: ModelSizes, trainer: TrainerParallel, *engines: EngineParallel, **options: object) -> Pair:
        targets = [layout for i, e in enumerate(engines) for layout in engine_layouts(model, e, name=f"engine-{i}")]
        pair = Pair(tmp_path / str(len(pairs)), model, trainer_layouts(model, trainer), targets, **options)  # type: ignore[arg-type]
        pairs.append(pair)
        return pair

    yield build
    for pair in pairs:
        pair.close()


def send(pair: Pair, version: str, links=None, seat: GroupSeat | None = None):
    return [rank.source.send(version, pair.links if links is None else links, seat) for rank in pair.ranks]


def arrive(pair: Pair, sent) -> None:
    for target, peer in enumerate(pair.peers):
        assert [s.errors for s in sent if s.errors] == []
        peer.verify([row for s in sent for row in s.sums.get(target, [])], False)
        peer.land()


@pytest.mark.parametrize("staging", ["always", "never"])
@pytest.mark.parametrize(
    ("model", "trainer", "engines"),
    [
        pytest.param(DENSE, TrainerParallel(tensor=2), (EngineParallel(), EngineParallel()), marks=pytest.mark.slow),
        (DENSE, TrainerParallel(pipeline=2), (EngineParallel(tensor=2),)),
        (EXPERTS, TrainerParallel(tensor=2, expert=2), (EngineParallel(tensor=2),)),
        pytest.param(
            EXPERTS,
            TrainerParallel(data=2, expert=2),
            (EngineParallel(tensor=2, expert=2),),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_engine_ranks_hold_exactly_what_the_trainer_ranks_staged_over_nixl(make, model, trainer, engines, staging):
    pair = make(model, trainer, *engines, staging=staging, bucket=4096)
    moved = []
    for version in (1, 2, 2):  # the last time nothing changes
        tensors = random_tensors(model, version)
        pair.stage(tensors)
        sent = send(pair, f"v{version}.{len(moved)}")
        if staging == "always" and len(moved) < 2:
            assert pair.wrong(tensors), "staged bytes reached the live weights before they were landed"
        arrive(pair, sent)
        assert pair.wrong(tensors) == []
        moved.append(max(s.moved for s in sent))
    assert moved == [1, 1, 0]


def nudged(tensors, seed: int, density: float):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.where(torch.rand(t.shape, generator=g) < density, -t, t) for n, t in tensors.items()}


def test_only_changed_words_are_sent_where_the_engine_has_the_version_before(make):
    """Each rank gets its own changes; what does not fit, and a rank that missed a version, is sent whole."""
    pair = make(DENSE, TrainerParallel(tensor=2), EngineParallel(tensor=2), EngineParallel(), bucket=4096, delta=True)
    tensors = random_tensors(DENSE, 1)
    wire = []
    for version, density in enumerate((1.0, 0.01, 0.5, 0.0, 0.01, 0.01)):
        tensors = nudged(tensors, version, density)
        pair.stage(tensors)
        links = pair.links if version != 4 else pair.links[:2]  # engine-1 is away
        sent = [rank.source.send(f"v{version}", links) for rank in pair.ranks]
        for target in (link.target for link in links):
            patches = [s.patches[target] for s in sent if target in s.patches]
            pair.peers[target].patch(patches)
            pair.peers[target].verify([row for s in sent for row in s.sums[target]], False)
            pair.peers[target].land()
        wrong = pair.wrong(tensors)
        assert {w.split(" ")[0].rstrip(":") for w in wrong} <= ({"engine-1"} if version == 4 else set())
        wire.append(sum(s.wire_bytes for s in sent))
    whole = wire[0]
    assert wire[1] < whole / 10
    assert wire[2] == whole
    assert wire[3] == 0
    assert 0 < wire[4] < whole / 10
    assert whole / 3 < wire[5] < whole  # engine-1 whole, engine-0's ranks their changes


def test_changes_on_another_version_are_found_by_the_checksums_and_a_whole_send_repairs(make):
    pair = make(DENSE, TrainerParallel(), EngineParallel(), delta=True)
    tensors = random_tensors(DENSE, 1)
    pair.stage(tensors)
    (sent,) = send(pair, "v1")
    arrive(pair, [sent])
    pair.peers[0]._staging[64] += 1  # as if another trainer had written there
    tensors = nudged(tensors, 2, 0.01)
    pair.stage(tensors)
    (sent,) = send(pair, "v2")
    pair.peers[0].patch([sent.patches[0]])
    with pytest.raises(RuntimeError, match="not what was sent"):
        pair.peers[0].verify(sent.sums[0], False)
    (sent,) = [rank.source.send("v2", pair.links, whole=True) for rank in pair.ranks]
    assert sent.patches == {}
    arrive(pair, [sent])
    assert pair.wrong(tensors) == []


def test_an_engine_gives_its_weights_to_an_equal_one(make):
    pair = make(DENSE, TrainerParallel(), EngineParallel(), EngineParallel())
    tensors = random_tensors(DENSE, 5)
    pair.stage(tensors)
    first = pair.links[:1]
    (sent,) = send(pair, "v1", first)
    pair.peers[0].verify(sent.sums[0], False)
    pair.peers[0].land()
    assert {line.split(" ")[0] for line in pair.wrong(tensors)} == {"engine-1"}
    sums = pair.peers[0].give(pair.answers[1], 30.0)
    pair.peers[1].verify(sums, True)
    pair.peers[1].land()
    assert pair.wrong(tensors) == []


@pytest.mark.parametrize("staging", ["always", "never"])
def test_half_a_transfer_is_found_by_its_checksums(make, staging):
    pair = make(DENSE, TrainerParallel(pipeline=2), EngineParallel(), staging=staging)
    pair.stage(random_tensors(DENSE, 6))
    half = pair.ranks[0].source.send("v1", pair.links)  # the other rank died before its first write
    lost = pair.ranks[1].source
    expected = lost.send("v1", []).sums
    assert expected == {}
    rows = list(half.sums[0])
    whole = [*rows, *_sums_of(pair, 1)]
    if staging == "always":
        with pytest.raises(RuntimeError, match="not what was sent"):
            pair.peers[0].verify(whole, False)
        return
    pair.peers[0].verify(whole, False)  # what stands in the live weights is compared under the pause
    with pytest.raises(RuntimeError, match="not what was sent"):
        pair.peers[0].land()


def _sums_of(pair: Pair, source: int):
    """What a source would have announced: sent to a twin of the engine."""
    twin = Pair(
        pair.root / "twin", pair.model, list(pair.plan.sources), [e.layout for e in pair.engines], staging=pair.staging
    )
    twin.stage(random_tensors(pair.model, 6))
    sums = twin.ranks[source].source.send("v1", twin.links).sums[0]
    twin.close()
    return sums


def test_memory_that_moved_is_registered_anew_and_the_old_link_is_dead(make):
    pair = make(DENSE, TrainerParallel(), EngineParallel())
    old = pair.answers[0]["token"]
    assert pair.peers[0].ready()["token"] == old
    pair.engines[0].storages[0].data = pair.engines[0].storages[0].clone()
    assert pair.peers[0].ready() == {"token": ""}
    with pytest.raises(RuntimeError, match="moved"):
        pair.peers[0].land()


def test_nan_is_found_by_name_in_what_was_staged_before_it_is_sent(make):
    pair = make(DENSE, TrainerParallel(tensor=2), EngineParallel())
    tensors = random_tensors(DENSE, 1)
    pair.stage(tensors)
    for rank in pair.ranks:
        rank.source.check()
        rank.source.discard()
    name = next(n for n in tensors if "v_proj" in n)
    tensors[name][0, 3] = float("nan")
    pair.stage(tensors)
    holder = next(r for r in pair.ranks if any(b.tensor == name and b.lo[0] == 0 for b in r.layout.blocks))
    with pytest.raises(NonFiniteWeights, match=name):
        holder.source.check()


def test_a_target_that_is_gone_is_named_and_the_others_get_their_bytes(make):
    pair = make(DENSE, TrainerParallel(), EngineParallel(), EngineParallel())
    tensors = random_tensors(DENSE, 8)
    pair.stage(tensors)
    links = pair.links
    broken = links[1].__class__(**{**links[1].__dict__, "base": links[1].base + (1 << 40)})
    (sent,) = send(pair, "v1", [links[0], broken])
    assert list(sent.errors) == [1]
    assert sent.errors[1].startswith("trainer rank 0: ")
    pair.peers[0].verify(sent.sums[0], False)
    pair.peers[0].land()
    (sent,) = send(pair, "v1")  # the staged bytes are still there
    arrive(pair, [sent])
    assert pair.wrong(tensors) == []


def test_staging_waits_for_the_send_before_it_and_needs_a_plan(make):
    pair = make(DENSE, TrainerParallel(), EngineParallel())
    source = pair.ranks[0].source
    with pytest.raises(PublicationFailed, match="without open"):
        source.stage()
    source.open(1.0)
    with pytest.raises(DeadlineExceeded, match="previous peer-to-peer transfer"):
        source.open(0.05)
    source.discard()
    with pytest.raises(PublicationFailed, match="staged nothing"):
        source.send("v1", pair.links)


def test_a_write_to_what_is_no_peer_fails_by_itself():
    here = Nixl("test-writer")
    local = torch.zeros(1 << 10, dtype=torch.uint8)
    here.register([region(local)], cuda=False)
    (error,) = here.write([Job(("x",), b"not metadata", [region(local)], [(0, 1 << 10, 0)], False)], 30.0)
    assert error is not None
    here.close()


def test_a_write_that_does_not_end_is_given_up_at_its_deadline_and_holds_up_no_other(monkeypatch):
    api = StuckApi(done={0})
    monkeypatch.setattr(transport, "nixl_api", lambda: api)
    here, local = Nixl("test-writer"), torch.zeros(64, dtype=torch.uint8)
    jobs = [Job((i,), f"peer {i}".encode(), [region(local)], [(4096, 64, 0)], False) for i in range(2)]
    first, second = here.write(jobs, 0.2)
    assert first is None
    assert second == "TransportError: the write was not done after 0.2 s"
    assert here.unsettled() == [(1,)]
    assert 1 not in api.released, "releasing does not stop it, and nobody could say any more when it has ended"
    api.done = {0, 1}
    assert here.unsettled() == []
    assert 1 in api.released


def test_a_write_that_was_given_up_lands_later_and_is_unsettled_until_it_has(monkeypatch):
    """Real NIXL over TCP, to a process that is stopped for longer than the write may take."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    nbytes = 64 << 20
    with subprocess.Popen(
        [sys.executable, "-c", _RECEIVER.format(nbytes=nbytes)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    ) as receiver:
        try:
            assert receiver.stdout is not None
            assert receiver.stdin is not None
            metadata, address = json.loads(receiver.stdout.readline())
            here, first, local = (
                Nixl("test-late"),
                torch.ones(64).to(torch.uint8),
                torch.full((nbytes,), 7).to(torch.uint8),
            )
            here.register([region(first), region(local)], cuda=False)
            peer = base64.b64decode(metadata)
            assert here.write([Job((0, "warm"), peer, [region(first)], [(address, 64, 0)], False)], 30.0) == [None]
            os.kill(receiver.pid, signal.SIGSTOP)
            job = Job((0, "late"), peer, [region(local)], [(address, nbytes, 0)], False)
            assert here.write([job], 1.0) == ["TransportError: the write was not done after 1 s"]
            assert here.unsettled() == [(0, "late")]
            os.kill(receiver.pid, signal.SIGCONT)
            deadline = time.monotonic() + 60
            while here.unsettled():
                assert time.monotonic() < deadline, "it neither arrived nor failed"
                time.sleep(0.05)
            print("count", file=receiver.stdin, flush=True)
            assert int(receiver.stdout.readline()) == nbytes, "it was called settled before it had arrived"
            here.close()
        finally:
            receiver.kill()


_RECEIVER = """
import base64, json, torch
from miles_disagg.engine.inplace.miles_inplace.transport import Nixl, region
area = torch.zeros({nbytes}, dtype=torch.uint8)
here = Nixl("test-receiver")
here.register([region(area)], cuda=False)
print(json.dumps([base64.b64encode(here.metadata()).decode(), area.data_ptr()]), flush=True)
input()
print(int((area == 7).sum()), flush=True)
"""


@pytest.mark.slow
def test_gloo_receives_that_nobody_sends_to_end_at_their_deadline():
    port, name = free_port(), "p2p-silent"
    script = _SILENT.format(port=port, name=name)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as silent:
        try:
            assert silent.stdout is not None
            assert silent.stdout.readline() == "here\n"
            pairs = Pairs(address="127.0.0.1", port=port, rank=1, world=2, name=name, backend="gloo", timeout=5.0)
            with pytest.raises(TransportError, match="[Tt]ime"):
                pairs.receive([(0, torch.zeros(64, dtype=torch.uint8))])
            pairs.leave()
        finally:
            silent.kill()


_SILENT = """
import time
from miles_disagg.engine.inplace.miles_inplace.transport import Pairs
print("here", flush=True)
Pairs(address="127.0.0.1", port={port}, rank=0, world=2, name={name!r}, backend="gloo", timeout=5.0)
time.sleep(60)
"""


class Allocations(TorchDispatchMode):
    """Storages made under it: bytes of those alive, at most and of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for tensor in (t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)):
            key, size = self._key(tensor), tensor.untyped_storage().nbytes()
            if key not in given and key not in self._made:
                self._made[key] = StorageWeakRef(tensor.untyped_storage()), size
                self.largest = max(self.largest, size)
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("model", "trainer", "staging"),
    [
        (DENSE, TrainerParallel(tensor=2), "always"),
        (EXPERTS, TrainerParallel(data=2, expert=2), "never"),
    ],
)
def test_a_rank_takes_the_stated_buckets_and_gathers_nothing(make, model, trainer, staging):
    """Its send buffer holds its share of what it has itself; beside it one piece at a time is converted."""
    bucket = 2048
    pair = make(model, trainer, EngineParallel(tensor=2), EngineParallel(tensor=2), staging=staging, bucket=bucket)
    stated = next(line for line in summary(pair.plan, bucket) if line.startswith("extra memory"))
    tensors = random_tensors(model, 1)
    for i, rank in enumerate(pair.ranks):
        own = {(b.tensor, b.lo, b.hi): b.numel for b in rank.layout.blocks}
        rank.hold(tensors)
        with Allocations() as seen:
            rank.source.route(Route.of(pair.plan, i, bucket))
            assert seen.largest == pair.plan.packed_bytes[i] == rank.source.describe()["packed_bytes"]
            rank.source.open(1.0)
            rank.source.stage()
            rank.source.check()
            rank.source.send("v1", pair.links)
        pieces = pair.plan.of_source(i)
        assert seen.peak <= pair.plan.packed_bytes[i] + bucket
        assert pair.plan.packed_bytes[i] <= 2 * sum(own.values()) + 64 * len(pieces)
        assert {p.tensor for p in pieces} <= {name for name, _, _ in own}
        assert f"{-(-max(pair.plan.packed_bytes) // bucket)} bucket(s)" in stated


def test_an_engine_receives_beside_its_weights_where_that_leaves_enough_free_and_else_into_them(make):
    pair = make(DENSE, TrainerParallel(), EngineParallel(), staging="auto")
    assert (pair.answers[0]["mode"], pair.answers[0]["bytes"]) == ("staging", pair.plan.staged_bytes[0])
    pair.prepare(0, spare=1 << 60)
    assert (pair.answers[0]["mode"], pair.answers[0]["base"]) == ("direct", 0)
    tensors = random_tensors(DENSE, 3)
    pair.stage(tensors)
    arrive(pair, send(pair, "v1"))
    assert pair.wrong(tensors) == []


def test_gloo_ranks_that_do_not_meet_say_where(make):
    pair = make(DENSE, TrainerParallel(), EngineParallel(), transport="torch")
    pair.stage(random_tensors(DENSE, 9))
    seat = GroupSeat("127.0.0.1", free_port(), 2, "p2p-alone", "gloo", 1.0, (1,))
    (sent,) = send(pair, "v1", seat=seat)
    assert "did not meet the others" in sent.errors[0]
    with pytest.raises(TransportError, match="rank 1 of 2 did not meet"):
        pair.peers[0].receive({**seat.fields(), "port": free_port()}, 1, [])
