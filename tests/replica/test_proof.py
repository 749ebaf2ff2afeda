"""Looking at live weights: what is wrong is fenced, what cannot be looked at is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_disagg.domain.errors import EngineError
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.base import Materialized
from miles_disagg.replica.gate import Phase
from miles_disagg.replica.proof import CannotLook, ProvenStager, Prover
from miles_disagg.weights.checkpoint import open_checkpoint, tensor_digests
from tests.fakes.engine import FakeEngine
from tests.fakes.publishing import tiny_tensors, write_base
from tests.fakes.replica import make_replica, ref


class StockEngine(FakeEngine):
    """Has no route for digests."""

    async def weights_digest(self) -> dict[str, str]:
        raise EngineError("no such route", 404)


class Here:
    """A stager whose checkpoint is there already."""

    def __init__(self, path: Path):
        self.path = path

    async def materialize(self, target: VersionRef) -> Materialized:
        return Materialized(target, self.path)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", tiny_tensors(size=16))
    return tmp_path / "base"


async def test_an_engine_without_the_route_is_looked_at_through_its_plugin(base: Path) -> None:
    stager, engine = ProvenStager(Here(base)), StockEngine(str(ref(0)))
    await stager.materialize(ref(0))
    replica = make_replica(engine)
    await replica.attach()
    with open_checkpoint(base) as checkpoint:
        live = tensor_digests(checkpoint)

    async def export() -> dict[str, str]:
        return live

    prover = Prover(replica, stager, 60.0, export)
    found = await prover.check()
    assert found is not None
    assert (found.live, found.wrong) == (found.published, ())
    live["model.norm.weight"] = "0" * 32
    found = await prover.check()
    assert found is not None
    assert found.wrong == ("model.norm.weight",)
    assert replica.gate.phase is Phase.FENCED


async def test_an_engine_that_cannot_be_looked_at_is_named_once(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    stager = ProvenStager(Here(base))
    await stager.materialize(ref(0))
    replica = make_replica(StockEngine(str(ref(0))))
    await replica.attach()

    async def export() -> dict[str, str]:
        raise CannotLook("the engine was not started with --custom-weight-loader")

    prover = Prover(replica, stager, 0.01, export)
    await prover.run()  # ends by itself
    assert not prover.supported
    assert "no fingerprint: the engine was not started with --custom-weight-loader" in caplog.text
    assert replica.fingerprint is None
    assert replica.ready
