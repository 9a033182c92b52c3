"""What `stream` is compared with over gRPC: a server that keeps raw frames in memory, `python -m benchmarks._stream_peers ADDRESS_FILE`.

Submit    a stream of frames, each acknowledged once its CRC-32 is taken and it is kept
Take      all frames kept so far, each checked against its CRC-32; then forgotten
SubmitOne, TakeOne    the same with one call a frame
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop
from isal.isal_zlib import crc32

from learner.process import keep_freed_memory
from protos import rpc
from protos.lifeline import die_with_parent

ACK = b"accepted........................"  # as long as a receipt
SERVICE = "bench.Raw"


class Store:
    """Frames in order of arrival, each with its checksum."""

    def __init__(self) -> None:
        self._frames: list[tuple[bytes, int]] = []

    def put(self, frame: bytes) -> bytes:
        self._frames.append((frame, crc32(frame)))
        return ACK

    def get(self, index: int) -> bytes:
        frame, crc = self._frames[index]
        assert crc32(frame) == crc, "a frame changed in memory"
        return frame

    async def submit(self, frames: AsyncIterator[bytes], context: Any) -> None:
        async for frame in frames:
            await context.write(self.put(frame))

    async def take(self, _: bytes, context: Any) -> None:
        for index in range(len(self._frames)):
            await context.write(self.get(index))
        self._frames.clear()

    async def submit_one(self, frame: bytes, _: Any) -> bytes:
        return self.put(frame)

    async def take_one(self, index: bytes, _: Any) -> bytes:
        """The last one empties the store."""
        number = int(index)
        frame = self.get(number)
        if number == len(self._frames) - 1:
            self._frames.clear()
        return frame


def register(server: Any) -> None:
    store = Store()
    handlers: dict[str, Any] = {
        "Submit": grpc.stream_stream_rpc_method_handler(store.submit),
        "Take": grpc.unary_stream_rpc_method_handler(store.take),
        "SubmitOne": grpc.unary_unary_rpc_method_handler(store.submit_one),
        "TakeOne": grpc.unary_unary_rpc_method_handler(store.take_one),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


async def serve(path: Path) -> None:
    server = rpc.Server("127.0.0.1:0", [register])
    await server.start()
    part = path.with_suffix(".part")
    part.write_text(f"127.0.0.1:{server.port}")
    part.replace(path)
    await server.wait()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    keep_freed_memory()  # as the gateway does
    (uvloop.run if "--asyncio" not in sys.argv else asyncio.run)(serve(Path(sys.argv[1])))
