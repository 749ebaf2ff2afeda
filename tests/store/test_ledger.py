"""Numbering, watching and convergence, with a store and without files (broadcast)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miles_disagg.domain.errors import ClaimConflict, DeadlineExceeded, PointerConflict, PublicationFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.ledger import VersionLedger
from miles_disagg.store.local import LocalStore
from miles_disagg.store.publication import Description, Receipt
from miles_disagg.store.versions import VersionStore
from miles_disagg.store.watch import PollingSource
from miles_disagg.weights.digest import digest

NOTHING_CHANGED = (Description("xor", 0), [Receipt(None)])


def ref(version: int) -> VersionRef:
    return VersionRef("run", version)


@pytest.fixture(params=["disk", "broadcast"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> VersionLedger:
    store = VersionStore(LocalStore(tmp_path)) if request.param == "disk" else None
    ledger = VersionLedger("run", store)
    await ledger.claim("digest")
    return ledger


async def publish(ledger: VersionLedger) -> VersionRef:
    new = await ledger.begin()
    await ledger.commit(new, Description("xor", new.version - 1), [Receipt(None)])
    return new


async def test_numbering_starts_at_the_base_and_is_the_same_in_every_mode(ledger: VersionLedger) -> None:
    assert await ledger.latest() == ref(0)
    assert [await publish(ledger) for _ in range(3)] == [ref(1), ref(2), ref(3)]
    assert await ledger.latest() == ref(3)


async def test_before_the_claim_nothing_can_be_published() -> None:
    ledger = VersionLedger("run")
    assert await ledger.latest() is None
    with pytest.raises(PublicationFailed, match="claim"):
        await ledger.begin()


async def test_one_publication_is_open_at_a_time(ledger: VersionLedger) -> None:
    first = await ledger.begin()
    with pytest.raises(DeadlineExceeded, match="weight_v000001"):
        await ledger.begin(timeout=0.05)
    second = asyncio.create_task(ledger.begin(timeout=5))
    await ledger.commit(first, *NOTHING_CHANGED)
    assert await second == ref(2)


async def test_an_aborted_version_is_numbered_again(ledger: VersionLedger) -> None:
    first = await ledger.begin()
    await ledger.abort(first)
    assert await ledger.begin() == first
    await ledger.abort(ref(9))
    assert await ledger.latest() == ref(0)


async def test_only_what_was_begun_can_be_committed_and_again_is_harmless(ledger: VersionLedger) -> None:
    with pytest.raises(PointerConflict):
        await ledger.commit(ref(1), *NOTHING_CHANGED)
    new = await publish(ledger)
    await ledger.commit(new, *NOTHING_CHANGED)
    with pytest.raises(PointerConflict):
        await ledger.commit(ref(5), *NOTHING_CHANGED)
    assert await ledger.latest() == new


async def test_watchers_hear_of_a_version_and_a_wait_ends(ledger: VersionLedger) -> None:
    watchers = [asyncio.create_task(ledger.wait_newer(ref(0), 5)) for _ in range(20)]
    await asyncio.sleep(0)
    assert await ledger.wait_newer(ref(0), 0.02) is None
    await publish(ledger)
    assert await asyncio.gather(*watchers) == [ref(1)] * 20
    assert await ledger.wait_newer(None, 0) == ref(1)


async def test_convergence_is_the_time_until_the_required_share_acknowledged() -> None:
    ledger = VersionLedger("run", share=0.5)
    await ledger.claim("digest")
    for name in "abcd":
        await ledger.register(name)
    new = await publish(ledger)
    published = ledger._activations[1].published
    assert published is not None
    await ledger.record_activation("a", new, published + 1)
    assert ledger.convergence_seconds(new) is None
    assert await ledger.wait_converged(new, 0.01) is None
    await ledger.record_activation("b", new, published + 3)
    await ledger.record_activation("b", new, published + 9)
    assert ledger.convergence_seconds(new) == pytest.approx(3)
    assert await ledger.wait_converged(new, 1) == pytest.approx(3)
    assert ledger.metrics() == {"fleet/convergence_seconds": pytest.approx(3)}


async def test_a_replica_that_skips_a_version_and_one_that_left_do_not_block_convergence() -> None:
    ledger = VersionLedger("run")
    await ledger.claim("digest")
    for name in "abc":
        await ledger.register(name)
    first, second = await publish(ledger), await publish(ledger)
    await ledger.record_activation("a", first, 2e9)
    await ledger.record_activation("b", second, 3e9)
    assert ledger.convergence_seconds(first) is None
    await ledger.forget("c")
    published = ledger._activations[1].published
    assert published is not None
    assert ledger.convergence_seconds(first) == pytest.approx(3e9 - published)
    assert ledger.acknowledged_by_all() == 1


async def test_a_broadcast_may_be_acknowledged_before_it_is_committed(ledger: VersionLedger) -> None:
    new = await ledger.begin()
    await ledger.record_activation("a", new, 1.0)
    assert ledger.convergence_seconds(new) is None
    await ledger.commit(new, *NOTHING_CHANGED)
    assert ledger.convergence_seconds(new) == 0.0


@pytest.mark.parametrize("wrong", [VersionRef("run", 7), VersionRef("other", 0)])
async def test_a_version_that_is_not_published_cannot_be_acknowledged(ledger: VersionLedger, wrong: VersionRef) -> None:
    with pytest.raises(PointerConflict, match="replica-1"):
        await ledger.record_activation("replica-1", wrong, 1.0)


async def test_a_run_that_was_resumed_elsewhere_stops_publishing_here(tmp_path: Path) -> None:
    ledger = VersionLedger("run", VersionStore(LocalStore(tmp_path)))
    claim = await ledger.claim("digest", ttl=0.1)
    assert claim is not None
    VersionStore(LocalStore(tmp_path)).claim("run", "digest", owner=claim.owner)
    with pytest.raises(ClaimConflict, match="resumed elsewhere"):
        await asyncio.wait_for(ledger.keep_alive(ttl=0.1), 5)
    with pytest.raises(ClaimConflict):
        await ledger.begin()


async def test_a_lost_ledger_comes_back_from_the_store(tmp_path: Path) -> None:
    ledger = VersionLedger("run", VersionStore(LocalStore(tmp_path)))
    claim = await ledger.claim("digest")
    assert claim is not None
    await publish(ledger)
    again = VersionLedger("run", VersionStore(LocalStore(tmp_path)))
    await again.claim("digest", owner=claim.owner)
    assert await again.latest() == ref(1)
    assert await publish(again) == ref(2)


async def test_a_publication_that_was_open_when_its_ledger_was_lost_is_finished_by_the_next_one(tmp_path: Path) -> None:
    ledger = VersionLedger("run", VersionStore(LocalStore(tmp_path)))
    claim = await ledger.claim("digest")
    assert claim is not None
    opened = await ledger.begin()
    again = VersionLedger("run", VersionStore(LocalStore(tmp_path)))
    assert not again.claimed
    await again.claim("digest", owner=claim.owner, epoch=claim.epoch)
    with pytest.raises(PointerConflict):
        await again.reopen(ref(2))
    await again.reopen(opened)
    await again.commit(opened, *NOTHING_CHANGED)
    await again.reopen(opened)  # it is published: nothing to do
    assert await publish(again) == ref(2)
    third = VersionLedger("run", VersionStore(LocalStore(tmp_path)))
    with pytest.raises(ClaimConflict, match="resumed elsewhere"):  # `again` holds it, in a process that lives
        await third.claim("digest", owner=claim.owner, epoch=claim.epoch)


async def test_the_post_write_hook_is_called_again_where_it_may_not_have_been(tmp_path: Path) -> None:
    class Killed(BaseException):
        """The end of the process: nothing after the pointer's move is done."""

    called: list[int] = []

    def ledger_of(died: bool = False) -> VersionLedger:
        def hook(new: VersionRef) -> None:
            if died:
                raise Killed
            called.append(new.version)

        return VersionLedger("run", VersionStore(LocalStore(tmp_path)), post_write=hook)

    first = ledger_of()
    claim = await first.claim("digest")
    assert claim is not None
    await first.announce()
    assert called == [], "the base was not written by the run"
    await publish(first)
    dying = ledger_of(died=True)
    await dying.claim("digest", owner=claim.owner)
    opened = await dying.begin()
    with pytest.raises(Killed):
        await dying.commit(opened, Description("xor", 1), [Receipt(None)])
    assert called == [1]

    restarted = ledger_of()  # the store's process: its driver knows what was open
    await restarted.claim("digest", owner=claim.owner)
    await restarted.reopen(opened)
    for _ in range(2):
        await restarted.commit(opened, Description("xor", 1), [Receipt(None)])
    assert called == [1, 2]
    resumed = ledger_of()  # a continued run: nobody knows
    await resumed.claim("digest", owner=claim.owner)
    await resumed.announce()
    assert called == [1, 2, 2]
    assert await publish(resumed) == ref(3)
    assert called == [1, 2, 2, 3]


async def test_full_versions_that_all_replicas_acknowledged_are_removed_unless_files_are_kept(tmp_path: Path) -> None:
    store = VersionStore(LocalStore(tmp_path))
    ledger = VersionLedger("run", store)
    await ledger.claim("digest")
    await ledger.register("a")
    for _ in range(4):
        new = await ledger.begin()
        store.objects.put(f"{new}/model-00000-of-00001.safetensors", b"x")
        receipt = Receipt("model-00000-of-00001.safetensors", 1, digest(b"x"), {"t": "0"})
        await ledger.commit(new, Description(None), [receipt])
    assert (await ledger.collect(keep=10, keep_files=False)).versions == ()
    await ledger.record_activation("a", ref(3), 1.0)
    assert (await ledger.collect(keep=10, keep_files=True)).versions == ()
    assert (await ledger.collect(keep=10, keep_files=False)).versions == (1, 2, 3)
    assert store.versions("run") == [4]


async def test_without_a_number_to_keep_versions_go_once_every_replica_has_passed_them(tmp_path: Path) -> None:
    store = VersionStore(LocalStore(tmp_path))
    ledger = VersionLedger("run", store)
    await ledger.claim("digest")
    receipt = Receipt("model-00000-of-00001.safetensors", 1, digest(b"x"), {"t": "0"})
    for version in range(1, 6):
        new = await ledger.begin()
        store.objects.put(f"{new}/{receipt.file}", b"x")
        await ledger.commit(new, Description("xor" if version != 3 else None, version - 1), [receipt])
    assert (await ledger.collect(keep=None, keep_files=False)).versions == ()  # nobody is known to have read anything
    await ledger.register("a")
    await ledger.register("b")
    await ledger.record_activation("a", ref(5), 1.0)
    assert (await ledger.collect(keep=None, keep_files=False)).versions == ()  # b has nothing yet
    await ledger.record_activation("b", ref(2), 1.0)
    assert (await ledger.collect(keep=None, keep_files=False)).versions == ()  # b may want 3 by way of 2
    await ledger.record_activation("b", ref(4), 2.0)
    assert (await ledger.collect(keep=None, keep_files=True)).versions == ()
    assert (await ledger.collect(keep=None, keep_files=False)).versions == (1, 2)
    assert store.plan(ref(5), ref(4)).start == "held"


async def test_a_polling_source_sees_what_another_process_publishes(tmp_path: Path) -> None:
    source = PollingSource(VersionStore(LocalStore(tmp_path)), fastest=0.01)
    assert await source.latest() is None
    assert await source.wait_newer(None, 0.05) is None
    ledger = VersionLedger("run", VersionStore(LocalStore(tmp_path)))
    waiting = asyncio.create_task(source.wait_newer(None, 10))
    await ledger.claim("digest")
    assert await waiting == ref(0)
    await publish(ledger)
    assert await source.wait_newer(ref(0), 10) == ref(1)
