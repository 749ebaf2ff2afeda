"""Publications of real runs that go wrong, or move nothing: what is said, and what is served meanwhile."""

import asyncio
import json
import uuid
from types import SimpleNamespace

import pytest

from miles_disagg.cluster.assemble import assembled
from miles_disagg.cluster.fleet import Fleet, FleetTimeouts, Member
from miles_disagg.cluster.publications import Publications
from miles_disagg.config.placement import plan_placement
from miles_disagg.domain.errors import PublicationFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.observe.console import RunConsole
from miles_disagg.observe.events import Timeline
from tests.cluster.steps import publish_step
from tests.fakes import hooks

TRANSPORTS = {
    "disk-delta": ("--update-weight-transfer-mode", "disk-delta"),
    "disk-full": ("--update-weight-transfer-mode", "disk-full"),
    "broadcast": ("--update-weight-transfer-mode", "broadcast"),
    "broadcast-delta": ("--update-weight-mode", "delta"),
    "p2p": ("--update-weight-transfer-mode", "p2p"),
}


async def steps(config, after=None):
    """Train and publish every step of a run; `after(run)` with what settling raised, or None."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
        error = None
        await run.start_generation()
        try:
            for step in run.steps:
                batch, metrics = await publish_step(run, step)
                await run.settle()
                await run.report(step, batch, metrics)
        except PublicationFailed as failed:
            error = failed
        if after is not None:
            await after(run, error)
        await run.stop_generation()
        await run.close_books()


@pytest.mark.parametrize(
    "mode",
    ["disk-delta", *(pytest.param(m, marks=pytest.mark.slow) for m in ("disk-full", "broadcast", "broadcast-delta"))],
)
def test_a_policy_that_does_not_move_raises_a_visible_alarm(local_ray, run_config, capsys, mode):
    config = run_config(*TRANSPORTS[mode], "--lr", "1e-30", "--num-rollout", "3")
    asyncio.run(steps(config))
    assert "ALARM" in capsys.readouterr().out
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["weights/policy_does_not_move"] == 0
    assert rows[2]["weights/policy_does_not_move"] == 1


class OneEngine(Fleet):
    """A fleet whose only engine serves what `serves` says."""

    serves: int | None = 0

    async def applied(self, member):
        return self.serves


class Delivery:
    """A channel and a trainer: a delivery that lasts until `go`, and the repairs that were asked for."""

    def __init__(self):
        self.go, self.repairs = asyncio.Event(), []

    async def stage(self, ref):
        pass

    async def deliver(self, ref):
        await self.go.wait()
        return {}

    async def repair(self, ref, member):
        self.repairs.append((ref.version, member.spec.replica_id))


async def test_an_engine_is_sent_a_version_again_only_if_the_delivery_under_way_did_not_bring_it():
    said, channel = [], Delivery()
    member = Member(SimpleNamespace(replica_id="engine-0"), None, None)
    fleet = OneEngine([member], None, None, FleetTimeouts(1, 1, 1, 1), said.append)
    fleet.wait_converged = fleet.phase_metrics = nothing
    publications = Publications(
        "run", 0, channel, channel, fleet, Timeline("driver"),
        on_published=nothing, give_out=lambda _: None, timeout=30.0,
    )  # fmt: skip
    for serves in (1, 0):
        channel.go.clear()
        await publications.begin()
        version = publications.version
        asked = asyncio.create_task(publications.repair(member, VersionRef("run", version)))  # it is still at 0
        await asyncio.sleep(0.01)
        assert not asked.done()
        fleet.serves = version * serves
        channel.go.set()
        await asked
    assert channel.repairs == [(2, "engine-0")]
    assert said == ["engine-0 is at 0, not at run/weight_v000002: sending it again"]
    await publications.cancel()


async def test_a_run_that_stops_just_as_a_version_is_delivered_leaves_no_wait_behind():
    channel, stopping = Delivery(), []
    fleet = OneEngine([], None, None, FleetTimeouts(1, 1, 1, 1), lambda _: None)
    fleet.wait_converged = lambda *_: asyncio.Event().wait()
    publications = Publications(
        "run", 0, channel, channel, fleet, Timeline("driver"),
        on_published=nothing, give_out=lambda _: None, timeout=30.0,
    )  # fmt: skip

    async def deliver(ref):
        await channel.go.wait()
        stopping.append(asyncio.create_task(publications.cancel()))
        return {}

    channel.deliver = deliver
    await publications.begin()
    channel.go.set()
    while not stopping:
        await asyncio.sleep(0)
    await stopping[0]
    assert [t.get_name() for t in asyncio.all_tasks() - {asyncio.current_task()}] == []


async def nothing(*_):
    return {}


@pytest.mark.slow
def test_hooks_for_mounts_are_called_around_the_files_of_every_version(local_ray, run_config):
    run_id = f"hooked-{uuid.uuid4().hex[:8]}"
    paths = ("--custom-update-weight-post-write-path", "tests.fakes.hooks.post_write")
    paths += ("--custom-update-weight-pre-read-path", "tests.fakes.hooks.pre_read")
    config = run_config(*TRANSPORTS["disk-delta"], *paths, "--run-id", run_id, "--num-rollout", "1")
    try:
        asyncio.run(steps(config))
        lines = hooks.notes(run_id).read_text().splitlines()
    finally:
        hooks.notes(run_id).unlink(missing_ok=True)
    of_first = [line for line in lines if line.endswith(" 1")]
    # a source wrote; the committer verifies; index and pointer are written; the replica reads
    assert of_first == ["wrote 1", "reads 1", "wrote 1", "reads 1"], lines


@pytest.mark.slow
@pytest.mark.parametrize("mode", TRANSPORTS)
def test_weights_that_overflow_are_not_published_and_the_last_good_version_keeps_serving(local_ray, run_config, mode):
    # AdamW multiplies a matrix by 1 - lr * weight decay: one finite step of training makes every one of them infinite.
    blow_up = ("--lr", "1e37", "--weight-decay", "1000", "--num-rollout", "1")
    config = run_config(*TRANSPORTS[mode], *blow_up)

    async def look(run, error):
        assert "non-finite values in 'model." in str(error)
        assert "publish" in str(error)
        status = await run.fleet.status()
        assert [(row["applied"], row["ready"]) for row in status] == [(0, True)]

    asyncio.run(steps(config, look))


@pytest.mark.slow
def test_a_hook_that_fails_ends_the_publication_with_its_words(local_ray, run_config):
    config = run_config(*TRANSPORTS["disk-delta"], "--custom-update-weight-post-write-path", "tests.fakes.hooks.broken")

    async def look(run, error):
        assert "the mount is gone" in str(error)

    asyncio.run(steps(config, look))
