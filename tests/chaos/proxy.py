"""A TCP proxy between a replica and the gateway that can cut all connections, refuse new ones, or stall every byte."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

_CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards 127.0.0.1:port to a target, in a thread of its own, until `stop`. mode: "pass", "cut" or "stall"."""

    def __init__(self, target_port: int, port: int) -> None:
        self.port, self._target_port = port, target_port
        self.mode = "pass"
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", port))
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def set(self, mode: str) -> None:
        """Takes effect at once; "cut" also resets what is connected."""
        self.mode = mode
        if mode == "cut":
            self._loop.call_soon_threadsafe(self._reset)

    def stop(self) -> None:
        self.set("cut")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "cut":
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        self._writers -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(_CHUNK_BYTES):
                while self.mode == "stall":
                    await asyncio.sleep(0.05)
                writer.write(data)
                await writer.drain()
        writer.close()
