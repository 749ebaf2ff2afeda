"""A TCP proxy on loopback that misbehaves on purpose: it cuts, truncates and delays connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class TcpProxy:
    """`fault(n)` says what happens to the n-th connection: None, `refuse` (cut at once), `cut` (after the request went
    through, before any answer), `truncate` (after 100 bytes of the answer), `delay` (0.3 s)."""

    def __init__(self, port: int):
        self._target, self.connections = port, 0
        self.fault: Callable[[int], str | None] = lambda n: None
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut_all()

    def cut_all(self) -> None:
        """End every connection now, as a cable does."""
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault, self.connections = self.fault(self.connections), self.connections + 1
        if fault == "refuse":
            writer.transport.abort()
            return
        upstream, to_upstream = await asyncio.open_connection("127.0.0.1", self._target)
        self._open |= {writer, to_upstream}
        try:
            up = asyncio.create_task(self._pump(reader, to_upstream))
            down = asyncio.create_task(self._pump(upstream, writer, fault))
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            for task in (up, down):
                task.cancel()
        finally:
            for end in (writer, to_upstream):
                self._open.discard(end)
                end.transport.abort() if fault in ("cut", "truncate") else end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: str | None = None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if fault == "cut":
                    return
                if fault == "delay":
                    await asyncio.sleep(0.3)
                writer.write(data[:100] if fault == "truncate" else data)
                await writer.drain()
                if fault == "truncate":
                    return


@asynccontextmanager
async def tcp_proxy(port: int) -> AsyncIterator[TcpProxy]:
    """A running proxy in front of `port`."""
    proxy = TcpProxy(port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
