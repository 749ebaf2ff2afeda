"""One rank's session: the map, the patch being staged, and the thread that answers on `rank-<n>.sock`.

One JSON object a line in, one out: {"ok": true, ...} or {"ok": false, "error": "..."}. The thread works on a stream of
its own while the scheduler serves. `commit` runs in the scheduler, between two batches, and so does what is `call`ed:
requests of many small operations, when nothing is to be served.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from .peer import Peer
from .weights import LiveWeights, Staged

# A scheduler that polls takes the interpreter lock again before this thread, which waited for it, has woken up: on an
# H200 that cost 0.2 to 80 ms a step, whatever the step was. An idle one sleeps with `--sleep-on-idle`, as engines are
# started here; for the rest there is this interval (5 ms by default), and the thread does little in many small steps.
_SWITCH_SECONDS = 2e-4


class Session:
    """Opens in the scheduler (milliseconds: nothing is read but headers). `failure`: why the model cannot be mapped."""

    def __init__(self, model: Any, directory: str, checkpoint: str):
        self._lock = threading.Lock()
        self._staged: tuple[str, Staged | Peer] | None = None
        self._directory = directory
        self._tracked: int | None = None  # fingerprint that the live weights should have
        self.failure: str | None = None
        self._weights: LiveWeights | None = None
        self._peer: Peer | None = None
        begun = time.perf_counter()
        try:
            self._weights = LiveWeights(model, checkpoint)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        self._opened_in = time.perf_counter() - begun
        distributed = torch.distributed
        initialized = distributed.is_available() and distributed.is_initialized()
        rank = self._rank = distributed.get_rank() if initialized else 0
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(os.path.join(directory, f"rank-{rank}.sock"))
        self._server.listen(4)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._interval, _SWITCH_SECONDS))
        threading.Thread(target=self._serve, name="miles-inplace", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        sys.setswitchinterval(self._interval)
        if self._peer is not None:
            self._peer.close()

    def commit(self, identity: str) -> None:
        """In the scheduler: scatter what was staged as `identity` and note how it went. Never raises."""
        begun = time.perf_counter()
        try:
            with self._lock:
                staged, self._staged = self._staged, None
                if staged is None or staged[0] != identity:
                    raise RuntimeError(f"{identity} is not staged")
                if not self._live.unmoved():
                    raise RuntimeError("parameters were moved since the map was recorded")
                if self._live.device.type == "cuda":
                    torch.cuda.synchronize(self._live.device)  # a batch may still be running on another stream
                if isinstance(staged[1], Peer):
                    self._tracked = None
                    staged[1].land()
                else:
                    self._live.scatter(staged[1])
                    if self._tracked is not None:
                        self._tracked = (self._tracked + staged[1].added) % 2**64
            result = {"ok": True, "seconds": time.perf_counter() - begun}
        except BaseException as error:
            self._tracked = None
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        self._note(identity, result)

    def call(self, identity: str, request: dict[str, Any]) -> None:
        """In the scheduler: answer a request that the thread would answer too, and note the answer. Never raises."""
        self._note(identity, self._answered(request))

    def _note(self, identity: str, result: dict[str, Any]) -> None:
        # A file, not the socket: under the pause nothing should depend on when the thread gets a turn.
        path = os.path.join(self._directory, f"{identity}-{self._rank}.json")
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(result, file)

    # --- in the thread ------------------------------------------------------------------------------

    @property
    def _live(self) -> LiveWeights:
        if self._weights is None:
            raise RuntimeError(self.failure)
        return self._weights

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            try:
                with connection, connection.makefile("rwb") as stream:
                    for line in stream:
                        stream.write(json.dumps(self._answer(line)).encode() + b"\n")
                        stream.flush()
            except Exception:
                continue

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except ValueError as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}
        return self._answered(request)

    def _answered(self, request: dict[str, Any]) -> dict[str, Any]:
        begun = time.perf_counter()
        try:
            action = getattr(self, "_do_" + request.pop("op"))
            with torch.no_grad(), self._own_stream():
                out = action(**request)
            return {"ok": True, "seconds": time.perf_counter() - begun, **out}
        except BaseException as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        device = None if self._weights is None else self._weights.device
        if device is None or device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def _do_status(self) -> dict[str, Any]:
        return {"opened_in": self._opened_in, **self._live.describe()}

    def _do_probe(self, directory: str, limit: int) -> dict[str, Any]:
        return {"mismatch": self._live.probe(directory, limit)}

    def _do_compare(self, directory: str) -> dict[str, Any]:
        return {"wrong": self._live.compare(directory), "elements": self._live.describe()["elements"]}

    def _do_stage(self, id: str, patch: str) -> dict[str, Any]:
        with self._lock:
            self._staged = None
        staged = self._live.stage(patch)
        with self._lock:
            self._staged = (id, staged)
        return {"elements": staged.elements, "changed": staged.changed}

    def _do_discard(self) -> dict[str, Any]:
        """Forget what was staged, and the fingerprint: the weights were reloaded by others."""
        with self._lock:
            self._staged = self._tracked = None
        return {}

    # --- peer to peer -------------------------------------------------------------------------------

    @property
    def _peered(self) -> Peer:
        if self._peer is None:
            self._peer = Peer(self._live, f"engine-rank-{self._rank}")
        return self._peer

    def _do_peer_layout(self) -> dict[str, Any]:
        return self._peered.layout()

    def _do_peer_prepare(self, pieces: list[str], **options: Any) -> dict[str, Any]:
        """pieces: one file a rank."""
        return self._peered.prepare(pieces[self._rank], **options)

    def _do_peer_ready(self) -> dict[str, Any]:
        return self._peered.ready()

    def _do_peer_receive(
        self, group: dict[str, Any], ranks: list[int], writes: list[list[list[int]]]
    ) -> dict[str, Any]:
        self._peered.receive(group, ranks[self._rank], writes[self._rank])
        return {}

    def _do_peer_verify(
        self, id: str, sums: list[list[list[Any]]], given: bool, patches: list[list[list[int]]]
    ) -> dict[str, Any]:
        """What arrived is right: the commit of `id` lands it. given: it was written into the live weights."""
        if patches:
            self._peered.patch(patches[self._rank])
        self._peered.verify(sums[self._rank], given)
        with self._lock:
            self._staged = (id, self._peered)
        return {}

    def _do_peer_give(self, to: list[dict[str, Any]], timeout: float) -> dict[str, Any]:
        return {"sums": self._peered.give(to[self._rank], timeout)}

    def _do_peer_unsettled(self) -> dict[str, Any]:
        return {"unsettled": self._peer is not None and self._peer.unsettled()}

    def _do_verify(self) -> dict[str, Any]:
        """Fingerprint all live weights and compare with the one tracked; the first call only takes it."""
        live = self._live.fingerprint()
        tracked, self._tracked = self._tracked, live
        return {"same": tracked is None or tracked == live, "fingerprint": live}

    def _do_export(self, path: str, begins: dict[str, int]) -> dict[str, Any]:
        return {"converted": self._live.export(path, begins)}
