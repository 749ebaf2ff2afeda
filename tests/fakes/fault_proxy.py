"""An HTTP proxy on loopback that misbehaves on purpose, in front of a real S3 server."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

Fault = str
"""`500` `403` (not forwarded), `lose-answer` (forwarded, connection cut), `truncate` `flip` (body), `slow`, `delay`,
`twice` (forwarded two times), `unconditional` (forwarded without If-Match and If-None-Match), `overtaken` (forwarded
only after a later request of its method was answered), `other-part` (second and third part of an object answered with
each other's bytes, as a confused cache would)."""
PART = 16 << 20
"""Bytes of the parts that `S3Store` uploads and downloads."""


class FaultProxy:
    """`faults(method, path)` names the fault of a request, or None. Counts requests."""

    def __init__(self, backend: str):
        self.backend = urlparse(backend)
        self.faults: Callable[[str, str], Fault | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.answered: list[int] = []  # numbers of requests, in the order in which they were answered
        self._turn = threading.Condition()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                with proxy._turn:
                    number = len(proxy.requests)
                    proxy.requests.append((self.command, self.path))
                proxy.serve(self, proxy.faults(self.command, self.path), number)
                with proxy._turn:
                    proxy.answered.append(number)
                    proxy._turn.notify_all()

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def first(self, count: int, fault: Fault, method: str) -> None:
        """The next `count` requests of `method` have `fault`."""
        left, lock = [count], threading.Lock()

        def choose(found: str, path: str) -> Fault | None:
            with lock:
                if found != method or left[0] == 0:
                    return None
                left[0] -= 1
                return fault

        self.faults = choose

    def serve(self, handler: BaseHTTPRequestHandler, fault: Fault | None, number: int) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        asked = handler.headers.get("range") or ""
        if fault == "overtaken":
            with self._turn:
                same = lambda: any(n > number and self.requests[n][0] == handler.command for n in self.answered)  # noqa: E731
                assert self._turn.wait_for(same, 10), "no later request: nothing can overtake this one"
        if fault == "other-part" and asked:
            begin, end = (int(n) for n in asked.removeprefix("bytes=").split("-"))
            shift = {PART: PART, 2 * PART: -PART}.get(begin, 0)
            handler.headers.replace_header("range", f"bytes={begin + shift}-{end + shift}")
        if fault in ("500", "403"):
            text = b"<Error><Code>AccessDenied</Code></Error>" if fault == "403" else b"<Error/>"
            handler.send_response(int(fault))
            handler.send_header("content-length", str(len(text)))
            handler.end_headers()
            if handler.command != "HEAD":
                handler.wfile.write(text)
            return
        if fault == "delay":
            time.sleep(0.3)
        if fault == "unconditional":
            del handler.headers["if-match"], handler.headers["if-none-match"]
        if fault == "twice":
            self._forward(handler, body)
        status, headers, data = self._forward(handler, body)
        if fault == "lose-answer":
            handler.close_connection = True
            return
        if fault == "flip" and data:
            data = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        handler.send_response(status)
        for name, value in headers:
            if name.lower() == "content-range" and fault == "other-part":
                value = f"bytes {asked.removeprefix('bytes=')}/{value.rpartition('/')[2]}"
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if fault == "truncate":
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True
        elif fault == "slow":
            for i in range(len(data)):
                handler.wfile.write(data[i : i + 1])
                handler.wfile.flush()
                time.sleep(0.05)
        else:
            handler.wfile.write(data)

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.backend.hostname or "", self.backend.port, timeout=30)
        try:
            headers = {k: v for k, v in handler.headers.items() if k.lower() not in ("connection",)}
            connection.request(handler.command, handler.path, body or None, headers)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()


@contextmanager
def fault_proxy(backend: str) -> Iterator[FaultProxy]:
    """A running proxy in front of `backend`."""
    proxy = FaultProxy(backend)
    thread = threading.Thread(target=proxy._server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy._server.shutdown()
        proxy._server.server_close()
        thread.join(5)
