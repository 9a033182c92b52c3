"""A far replica's fetching alone: python -m tests.learner.gateway.far_replica ADDRESS FOLDER; a line on stdin: the newest version's
number; the answer: one JSON line."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import xxhash

from protos import rpc
from protos.learner.v1alpha1 import learner_pb2_grpc
from protos.weights.mirror import Mirror
from rollout_server.weights.fetching import LearnerSource


async def main() -> None:
    address, folder = sys.argv[1:]
    async with rpc.channel(address) as channel:
        stub = learner_pb2_grpc.LearnerServiceStub(channel)
        source = LearnerSource(Mirror(Path(folder)), lambda request: stub.FetchWeights(request, timeout=120))
        for line in sys.stdin:
            began, before = time.monotonic(), source.stats.num_bytes
            await source.bring(int(line))
            source.mirror.confirm()
            data = b"".join(source.mirror.read(index, 0, 1 << 30) for index in range(len(source.mirror.manifest.buckets)))
            answer = {"digest": xxhash.xxh3_64_hexdigest(data), "seconds": time.monotonic() - began, "bytes": source.stats.num_bytes - before, "deltas": source.stats.num_deltas, "full": source.stats.num_full}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
