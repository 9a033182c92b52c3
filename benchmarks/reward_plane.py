"""Rate and isolation of the reward plane, seen by a caller: `python -m benchmarks.reward_plane --json`.

scores_per_s: distinct items, a trivial function in its spawned process, ScoreBatch with 64 items a message.
cheap_p99_ms: latency of single items of a cheap scorer while 500 calls of a sick one are under way at any time
(an async function: 1 s a call, 5 % raise, 2 % hang until their limit).
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import uvloop
import yaml

from benchmarks import _line
from benchmarks._line import ROOT, Bar, Pair
from protos import rpc
from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub

BATCH_ITEMS = 64
IN_FLIGHT_BATCHES = 8
SICK_CONCURRENT = 500
ROUNDS = 6

SCORERS = '''
import asyncio
import random


def cheap(prompt, completion, fields):
    """Whether the completion is the answer."""
    return float(completion == str(fields["answer"]))


async def sick(prompt, completion, fields):
    """A second a call, 5 % errors, 2 % hangs."""
    lot = random.random()
    await asyncio.sleep(3600 if lot < 0.02 else 1.0)
    if lot > 0.95:
        raise ConnectionError("the endpoint is sick")
    return 1.0
'''


@contextmanager
def service() -> Iterator[str]:
    """Address of `python -m reward_server` with both scorers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "scorers_to_measure.py").write_text(SCORERS)
        scorers = [{"name": each, "use": f"scorers_to_measure:{each}", "limit_s": 5.0} for each in ("cheap", "sick")]
        (folder / "reward.yaml").write_text(yaml.safe_dump({"scorers": scorers}))
        command = [sys.executable, "-m", "reward_server", "--config", "reward.yaml", "--address-file", "address"]
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
        try:
            until_s = time.monotonic() + 60
            while not (folder / "address").exists():
                if process.poll() is not None or time.monotonic() > until_s:
                    process.kill()
                    raise RuntimeError(f"the reward server did not start: {process.communicate()[1]}")
                time.sleep(0.05)
            yield (folder / "address").read_text()
        finally:
            process.terminate()
            process.communicate()


def item(number: int, scorer: str, is_right: bool = True) -> pb.ScoreRequest:
    made = pb.ScoreRequest(id=str(number), scorer=scorer, prompt=f"What is {number} + 1?", completion=str(number + is_right))
    made.fields.update({"answer": number + 1})
    return made


async def scores_per_s(stub: RewardServiceStub, num_items: int) -> float:
    """Items answered a second, each answer checked: every seventh item is wrong."""
    room = asyncio.Semaphore(IN_FLIGHT_BATCHES * BATCH_ITEMS)

    async def batches() -> AsyncIterator[pb.ScoreBatchRequest]:
        for start in range(0, num_items, BATCH_ITEMS):
            for _ in range(BATCH_ITEMS):
                await room.acquire()
            numbers = range(start, start + BATCH_ITEMS)
            yield pb.ScoreBatchRequest(requests=[item(number, "cheap", number % 7 != 0) for number in numbers])

    began_s = time.perf_counter()
    values: dict[int, float] = {}
    async for message in stub.ScoreBatch(batches()):
        for answer in message.responses:
            values[int(answer.id)] = answer.reward.score.value if answer.reward.HasField("score") else -1.0
            room.release()
    took_s = time.perf_counter() - began_s
    if values != {number: float(number % 7 != 0) for number in range(num_items)}:
        raise RuntimeError("the scores are not those of the items")
    return num_items / took_s


async def cheap_latencies_ms(stub: RewardServiceStub, num_items: int) -> list[float]:
    """Latency of cheap items sent every 10 ms beside the sick scorer's load."""
    load = asyncio.create_task(_sick_load(stub))
    await asyncio.sleep(3.0)
    call = stub.Score()
    latencies = []
    for number in range(num_items):
        began_s = time.perf_counter()
        await call.write(item(number, "cheap"))
        answer = await call.read()
        if answer is grpc.aio.EOF or answer.reward.score.value != 1.0:
            raise RuntimeError(f"a cheap item was not scored: {answer}")
        latencies.append(1000 * (time.perf_counter() - began_s))
        await asyncio.sleep(0.01)
    load.cancel()
    return latencies


async def _sick_load(stub: RewardServiceStub) -> None:
    """Keeps SICK_CONCURRENT calls of the sick scorer under way, on a stream of their own."""
    room = asyncio.Semaphore(SICK_CONCURRENT)

    async def requests() -> AsyncIterator[pb.ScoreRequest]:
        number = 0
        while True:
            await room.acquire()
            await asyncio.sleep(random.random() / SICK_CONCURRENT)  # spread over the second, as callers are
            yield item(number, "sick")
            number += 1

    async for _ in stub.Score(requests()):
        room.release()


async def measure(address: str, num_items: int) -> tuple[list[Pair], float]:
    """(rounds, 99th percentile of the cheap latency in ms)."""
    async with rpc.channel(address) as channel:
        stub = RewardServiceStub(channel)
        await scores_per_s(stub, num_items // 4)
        rates = [await scores_per_s(stub, num_items) for _ in range(ROUNDS)]
        latencies = await cheap_latencies_ms(stub, 800)
    return [{"scores_per_s": rate} for rate in rates], statistics.quantiles(latencies, n=100)[98]


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--items", type=int, default=64 * 500, help="items of a round, a multiple of 64")
    options = parser.parse_args()
    with service() as address:
        rounds, p99_ms = uvloop.run(measure(address, options.items))
    bars = [
        Bar(name="scores_per_s", value=statistics.median(each["scores_per_s"] for each in rounds), op=">=", bar=10_000),
        Bar(name="cheap_p99_ms", value=p99_ms, op="<=", bar=50),
    ]
    left_out = {"left_out": {"cache_hits_per_s": "the server has no cache"}}
    _line.report("reward_plane", bars=bars, pairs=rounds, packages=("grpcio",), quiet=options.json, notes=left_out)


if __name__ == "__main__":
    main()
