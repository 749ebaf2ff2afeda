"""A replica on a fake engine, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from miles_disagg.replica.replica import Replica
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import RUN, make_replica, ref


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(str(ref(0)), token_delay=0.002)


@pytest.fixture
async def replica(engine: FakeEngine) -> AsyncIterator[Replica]:
    replica = make_replica(engine)
    assert await replica.attach(RUN) == ref(0)
    yield replica
    await replica.close()
