"""Who may publish a run: the claim in `<run_id>/run.json`, and when it counts as alive.

Moving the pointer is `versions`.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.domain.versions import check_run_id

FORMAT = 1
MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True)
class Holder:
    """The process that holds a claim. machine: this boot and process namespace; started: Unix time of the process."""

    host: str
    machine: str
    pid: int
    started: float

    @classmethod
    def me(cls) -> Holder:
        """This process."""
        return cls(socket.gethostname(), _machine(), os.getpid(), psutil.Process().create_time())

    def is_known_dead(self) -> bool:
        """True if the process ran on this machine and is gone. False when that cannot be known from here."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) > 1.0
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


@dataclass(frozen=True)
class Claim:
    """A run's right to publish. owner: secret-free token that a resume presents; epoch: counts re-claims.

    base_digest: `weights.checkpoint.checkpoint_digest` of the base checkpoint, which is version `boot_version`.
    created, expires: Unix times in seconds.
    """

    run_id: str
    owner: str
    base_digest: str
    boot_version: int
    created: float
    expires: float
    epoch: int
    holder: Holder

    def is_live(self, now: float) -> bool:
        """True while its holder may still publish."""
        return now < self.expires and not self.holder.is_known_dead()

    def describe(self) -> str:
        """For error messages: who holds it and until when."""
        until = time.strftime("%H:%M:%S", time.localtime(self.expires))
        return f"run {self.run_id} (process {self.holder.pid} on {self.holder.host}, live until {until})"

    def to_json(self) -> bytes:
        """Body of run.json, with a nonce."""
        return json.dumps({"format": FORMAT, **asdict(self), "nonce": uuid.uuid4().hex}).encode()

    @classmethod
    def from_json(cls, raw: bytes, where: str) -> Claim:
        """Parse run.json; CheckpointError naming the field."""
        body = load_json_object(raw, where)
        if body.get("format") != FORMAT:
            raise CheckpointError(f"format is {body.get('format')!r}, this version reads {FORMAT}", file=where)
        holder = body.get("holder")
        if not isinstance(holder, dict):
            raise CheckpointError("field holder is not an object", file=where)
        return cls(
            check_run_id(json_field(body, "run_id", str, where)),
            json_field(body, "owner", str, where),
            json_field(body, "base_digest", str, where),
            json_field(body, "boot_version", int, where),
            json_field(body, "created", float, where),
            json_field(body, "expires", float, where),
            json_field(body, "epoch", int, where),
            Holder(
                json_field(holder, "host", str, where),
                json_field(holder, "machine", str, where),
                json_field(holder, "pid", int, where),
                json_field(holder, "started", float, where),
            ),
        )


def load_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a small JSON object; CheckpointError naming the file."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not JSON: {error}", file=where) from None
    if not isinstance(body, dict):
        raise CheckpointError("not a JSON object", file=where)
    return body


def json_field(body: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """Field `name` of `kind` (a float may be written as an integer); non-negative if a number. Else CheckpointError."""
    value = body.get(name)
    allowed = (int, float) if kind is float else kind
    legal = isinstance(value, allowed) and not isinstance(value, bool)
    if not legal or (isinstance(value, (int, float)) and not (0 <= value < math.inf)):
        raise CheckpointError(f"field {name} is {str(value)[:100]!r}, expected {kind.__name__}", file=where)
    return value


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
