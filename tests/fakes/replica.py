"""Short forms for replica tests: a replica on a fake engine, requests, checkpoints that need not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.activation import ActivationLimits
from miles_disagg.replica.base import Materialized
from miles_disagg.replica.replica import Replica, ReplicaSettings
from miles_disagg.replica.session import SessionLimits
from miles_disagg.replica.wire import RolloutRequest, parse_requests
from tests.fakes.engine import FakeEngine

RUN = "run"


def ref(version: int) -> VersionRef:
    return VersionRef(RUN, version)


def checkpoint(version: int, path: str = "/nowhere", run: str = RUN) -> Materialized:
    return Materialized(VersionRef(run, version), Path(path))


def request(rid: str, *, n: int = 8, path: str = "/generate", **fields: Any) -> RolloutRequest:
    body = {"input_ids": [1, 2, 3], "rid": rid, "sampling_params": {"max_new_tokens": n}, **fields}
    return parse_requests(path, body)[0][0]


def exact(version: int) -> dict[str, int]:
    return {"exact_version": version}


def at_least(version: int) -> dict[str, int]:
    return {"min_version": version}


def make_replica(engine: FakeEngine, **settings: Any) -> Replica:
    settings.setdefault("activation", ActivationLimits(drain=0.2, control=5.0, load=5.0, broadcast=5.0))
    settings.setdefault("session", SessionLimits(admission_wait=5.0, reopen_wait=5.0))
    return Replica(ReplicaSettings("replica-0", **settings), engine)
