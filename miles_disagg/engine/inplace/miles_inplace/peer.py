"""One engine rank as the receiving end of a peer-to-peer transfer: its layout, its registered memory, the landing.

Bytes arrive in a staging area while the engine serves, and landing is one local copy under the pause; or, where memory
does not allow that, they are written straight into the live weights, and the whole transfer is under the pause.
"""

from __future__ import annotations

import base64
import json
import uuid
from dataclasses import dataclass
from typing import Any

import torch

from .memory import INTEGERS
from .transport import Job, Nixl, Pairs, TransportError, area_sums, element_sum, region
from .weights import LiveWeights


@dataclass(frozen=True)
class Arrival:
    """One piece: its bytes in the staging area, and the view of the live weights that they are for."""

    staged: int
    nbytes: int
    slot: int
    view: torch.Tensor


class Peer:
    """State: mapped -> prepared (memory registered) -> landed, again and again. label: for the transport's names."""

    def __init__(self, live: LiveWeights, label: str):
        self._live, self._label = live, label
        self._nixl: Nixl | None = None
        self._staging: torch.Tensor | None = None
        self._bucket = 0
        self._arrivals: list[Arrival] = []
        self._prepared: dict[str, Any] | None = None
        self._landing: list[tuple[torch.Tensor, torch.Tensor]] = []  # live view, its bytes in the staging area
        self._wanted: dict[int, int] | None = None  # sums of the pieces that stand in the live weights already

    def layout(self) -> dict[str, Any]:
        """Storages (elements, itemsize, dtype) and every tensor's shape and rows, as JSON."""
        slots = [[s.nbytes // s.dtype.itemsize, s.dtype.itemsize, _name(s.dtype)] for s in self._live.slots]
        tensors = {
            name: [
                list(self._live.headers[name].shape),
                [[row.slot, row.dims, row.source_offset, row.slot_offset] for row in rows],
            ]
            for name, rows in self._live.rows.items()
        }
        return {"storages": slots, "tensors": tensors}

    def prepare(
        self, pieces: str, transport: str, staging: str, bucket: int, spare: int, mail: int = 0
    ) -> dict[str, Any]:
        """Read the pieces (a JSON file: [[staged, nbytes, slot, offset, shape, strides]]), choose where they arrive and
        register that memory. staging: `auto` takes a staging area if `spare` bytes stay free beside it. mail: bytes of
        the mailboxes for changes, behind a staging area."""
        self.close()
        with open(pieces) as file:
            rows = json.load(file)
        self._arrivals = [self._arrival(*row) for row in rows]
        total = max((a.staged + -(-a.nbytes // 64) * 64 for a in self._arrivals), default=0)
        free = _free(self._live.device)
        if staging == "always" and free < total:
            raise RuntimeError(f"a staging area of {total} bytes does not fit into the {free} bytes that are free")
        staged = staging == "always" or (staging == "auto" and free >= total + spare)
        cuda = self._live.device.type == "cuda"
        if staged:
            area = self._staging = torch.zeros(total + mail, dtype=torch.uint8, device=self._live.device)
            self._landing = [(a.view, self._bytes(a, area, 0)) for a in self._arrivals]
        self._bucket = bucket
        used = sorted({a.slot for a in self._arrivals})
        slots = {slot: self._live.slots[slot] for slot in used}
        metadata = b""
        if transport == "nixl":
            self._nixl = Nixl(f"{self._label}-{uuid.uuid4().hex[:8]}")
            if self._staging is not None:
                self._nixl.register([region(self._staging)], cuda=cuda)
            # The live weights in any case: an engine gives them to one that joins.
            self._nixl.register([(s.pointer, s.nbytes, s.device.index or 0) for s in slots.values()], cuda=cuda)
            metadata = self._nixl.metadata()
        self._prepared = {
            "token": uuid.uuid4().hex,
            "mode": "staging" if staged else "direct",
            "bytes": total,
            "free": free,
            "metadata": base64.b64encode(metadata).decode(),
            "base": 0 if self._staging is None else self._staging.data_ptr(),
            "slots": {str(slot): s.pointer for slot, s in slots.items()},
            "device": self._live.device.index or 0,
            "cuda": cuda,
            "mail": mail if staged else 0,
        }
        return self._prepared

    def ready(self) -> dict[str, Any]:
        """What `prepare` said, if it still holds; else {"token": ""}."""
        if self._prepared is None or not self._live.unmoved():
            return {"token": ""}
        return self._prepared

    def receive(self, group: dict[str, Any], rank: int, writes: list[list[int]]) -> None:
        """torch.distributed: join as `rank` and receive [source rank, staged, nbytes] in order."""
        pairs = Pairs(rank=rank, **group)
        try:
            if self._staging is not None:
                pairs.receive([(source, self._staging[at : at + n]) for source, at, n in writes])
                return
            bounce = torch.empty(self._bucket, dtype=torch.uint8, device=self._live.device)
            for source, at, n in writes:
                pairs.receive([(source, bounce[:n])])
                for arrival in self._arrivals:
                    if at <= arrival.staged < at + n:
                        arrival.view.copy_(self._bytes(arrival, bounce, at))
        finally:
            pairs.leave()

    def patch(self, patches: list[list[int]]) -> None:
        """Put changed words from their mailboxes into the staging area, which holds the version before."""
        if patches and self._staging is None:
            raise RuntimeError("changes were sent, but there is no staging area")
        for at, count, word, width, begin in patches:
            assert self._staging is not None
            positions = self._staging[at : at + count * width].view(INTEGERS[width]).to(torch.int64)
            at += -(-count * width // 8) * 8
            values = self._staging[at : at + count * word].view(INTEGERS[word]).clone()
            end = begin + (self._staging.numel() - begin) // 8 * 8
            self._staging[begin:end].view(INTEGERS[word])[positions] = values

    def verify(self, sums: list[list[Any]], given: bool) -> None:
        """RuntimeError unless the staging area has the sender's checksums: [staged, nbytes, sum].

        What was written into the live weights, or `given` there by another engine, is left to `land`: the engine is
        paused then, and in this thread every piece would have to wait for the idle scheduler to give way.
        """
        self._wanted = None
        if given or self._staging is None:
            self._wanted = {at: value for at, _, value in sums}
            return
        sums = sorted(sums)
        found = area_sums(self._staging, [(at, n) for at, n, _ in sums]).tolist()
        for (at, n, wanted), value in zip(sums, found, strict=True):
            if value != wanted:
                raise RuntimeError(f"{n} bytes at {at} of the staging area are not what was sent")

    def land(self) -> None:
        """In the scheduler: copy the staging area into the live weights, or verify what was written there."""
        if not self._live.unmoved():
            raise RuntimeError("parameters were moved since their memory was registered")
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            for arrival, (at, _, value) in zip(self._arrivals, self.sums(), strict=True):
                if wanted.get(at) != value:
                    name = self._live.slots[arrival.slot].name
                    raise RuntimeError(f"{arrival.nbytes} bytes in {name} are not what was sent")
        elif self._landing:
            torch._foreach_copy_([view for view, _ in self._landing], [arrived for _, arrived in self._landing])
        if self._live.device.type == "cuda":
            torch.cuda.synchronize(self._live.device)

    def give(self, to: dict[str, Any], timeout: float) -> list[list[Any]]:
        """NIXL: write all live weights into those of an equal engine rank; the pieces' sums for its `verify`."""
        if self._nixl is None:
            raise RuntimeError("no memory is registered for one-sided writes")
        slots = {int(slot): pointer for slot, pointer in to["slots"].items()}
        own = sorted({a.slot for a in self._arrivals})
        if own != sorted(slots):
            raise RuntimeError("the other engine's weights lie in other storages")
        here = [self._live.slots[slot] for slot in own]
        local = [(s.pointer, s.nbytes, s.device.index or 0) for s in here]
        remote = [(slots[slot], s.nbytes, to["device"]) for slot, s in zip(own, here, strict=True)]
        job = Job(("give", to["token"]), base64.b64decode(to["metadata"]), local, remote, to["cuda"])
        (error,) = self._nixl.write([job], timeout)
        if error is not None:
            raise TransportError(error)
        return self.sums()

    def unsettled(self) -> bool:
        """True while something that `give` gave up may still arrive."""
        return self._nixl is not None and bool(self._nixl.unsettled())

    def sums(self) -> list[list[Any]]:
        """[staged, nbytes, sum] of every piece as it stands in the live weights."""
        values = torch.stack([element_sum(a.view, INTEGERS[a.view.itemsize]) for a in self._arrivals]).tolist()
        return [[a.staged, a.nbytes, value] for a, value in zip(self._arrivals, values, strict=True)]

    def close(self) -> None:
        """Give memory and registrations back."""
        if self._nixl is not None:
            self._nixl.close()
        self._nixl = self._staging = self._prepared = self._wanted = None
        self._arrivals, self._landing = [], []

    def _arrival(
        self, staged: int, nbytes: int, slot: int, offset: int, shape: list[int], strides: list[int]
    ) -> Arrival:
        live = self._live.slots[slot]
        arena = self._live.arenas[live.dtype.itemsize]
        view = arena.flat.view(live.dtype).as_strided(shape, strides, arena.start(live) + offset)
        return Arrival(staged, nbytes, slot, view)

    @staticmethod
    def _bytes(arrival: Arrival, buffer: torch.Tensor, base: int) -> torch.Tensor:
        at = arrival.staged - base
        return buffer[at : at + arrival.nbytes].view(arrival.view.dtype).view(arrival.view.shape)


def _free(device: torch.device) -> int:
    """Bytes that can be taken on the device (what torch has cached counts as taken)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        (line,) = [line for line in file if line.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
