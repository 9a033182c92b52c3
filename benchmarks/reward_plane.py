"""Rate and isolation of the reward plane, seen by a caller: `python -m benchmarks.reward_plane --json`.

scores_per_s: distinct items, cache off, a trivial function in its spawned process, ScoreBatch with 64 items a message.
cheap_p99_ms: latency of single items of that scorer while 500 calls of a sick HTTP endpoint are under way at any time (1 s a call,
5 % answered with HTTP 500, 2 % never answered), with the plane's usual retries, hedges and breaker.
cache_hits_per_s: items whose scores are in memory, ScoreBatch as above; the requests are made before the clock starts.
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
CACHED_ITEMS = BATCH_ITEMS * 50

SCORERS = '''
def cheap(prompt, completion, fields):
    """Whether the completion is the answer."""
    return float(completion == str(fields["answer"]))
'''

SICK = '''
import asyncio
import json
import random
import socket
import sys

from aiohttp import web


async def score(request):
    lot = random.random()
    items = json.loads(await request.read())["items"]
    await asyncio.sleep(3600 if lot < 0.02 else 1.0)
    if lot > 0.95:
        raise web.HTTPInternalServerError
    return web.json_response({"scores": [{"id": item["id"], "score": 1.0} for item in items]})


app = web.Application()
app.add_routes([web.post("/score", score)])
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
web.run_app(app, sock=listening, print=None, access_log=None)
'''


@contextmanager
def sick_endpoint() -> Iterator[str]:
    """URL of an HTTP endpoint in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", SICK], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/score"
    finally:
        process.kill()
        process.communicate()


@contextmanager
def service(url: str, cache: str) -> Iterator[str]:
    """Address of `python -m reward_server` with both scorers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "scorers_to_measure.py").write_text(SCORERS)
        cheap = {"name": "cheap", "use": "scorers_to_measure:cheap", "limit_s": 5.0}
        sick = {"name": "sick", "limit_s": 10.0, "http": {"urls": [url], "concurrency": SICK_CONCURRENT, "batch_items": 1}}
        (folder / "reward.yaml").write_text(yaml.safe_dump({"scorers": [cheap, sick], "cache": {"backend": cache}}))
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


async def cache_hits_per_s(stub: RewardServiceStub, num_items: int) -> float:
    """Items answered a second whose scores are in memory; each answer is checked afterwards."""
    numbers = [range(start, start + BATCH_ITEMS) for start in range(0, CACHED_ITEMS, BATCH_ITEMS)]
    prepared = [pb.ScoreBatchRequest(requests=[item(number, "cheap", number % 7 != 0) for number in each]) for each in numbers]
    room = asyncio.Semaphore(IN_FLIGHT_BATCHES)
    answered: list[pb.ScoreBatchResponse] = []

    async def batches(count: int) -> AsyncIterator[pb.ScoreBatchRequest]:
        for number in range(count):
            await room.acquire()
            yield prepared[number % len(prepared)]

    async def send(count: int) -> None:
        unreleased = 0
        async for message in stub.ScoreBatch(batches(count)):
            answered.append(message)
            unreleased += len(message.responses)
            while unreleased >= BATCH_ITEMS:
                unreleased -= BATCH_ITEMS
                room.release()

    await send(len(prepared))
    answered.clear()
    began_s = time.perf_counter()
    await send(num_items // BATCH_ITEMS)
    took_s = time.perf_counter() - began_s
    scores = [(int(each.id), each.reward.score.value) for message in answered for each in message.responses]
    if len(scores) != num_items or any(value != float(number % 7 != 0) for number, value in scores):
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


async def measure_rates(address: str, num_items: int) -> tuple[list[float], list[float]]:
    """(scores a second of each round, latencies of the cheap scorer in ms beside the sick one)."""
    async with rpc.channel(address) as channel:
        stub = RewardServiceStub(channel)
        await scores_per_s(stub, num_items // 4)
        rates = [await scores_per_s(stub, num_items) for _ in range(ROUNDS)]
        return rates, await cheap_latencies_ms(stub, 800)


async def measure_hits(address: str, num_items: int) -> list[float]:
    """Cache hits a second of each round; every answer but the first of an item must have been one."""
    async with rpc.channel(address) as channel:
        stub = RewardServiceStub(channel)
        rates = [await cache_hits_per_s(stub, num_items) for _ in range(ROUNDS)]
        cheap = next(each for each in (await stub.ListScorers(pb.ListScorersRequest())).scorers if each.name == "cheap")
        if cheap.num_answered - cheap.num_cached != CACHED_ITEMS:
            raise RuntimeError(f"{cheap.num_answered - cheap.num_cached} items were computed, {CACHED_ITEMS} should have been")
        return rates


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--items", type=int, default=64 * 500, help="items of a round, a multiple of 64")
    options = parser.parse_args()
    with sick_endpoint() as url:
        with service(url, "none") as address:
            rates, latencies_ms = uvloop.run(measure_rates(address, options.items))
        with service(url, "memory") as address:
            hits = uvloop.run(measure_hits(address, 2 * options.items))
    rounds: list[Pair] = [{"scores_per_s": rate, "cache_hits_per_s": hit} for rate, hit in zip(rates, hits, strict=True)]
    bars = [
        Bar(name="scores_per_s", value=statistics.median(rates), op=">=", bar=10_000),
        Bar(name="cheap_p99_ms", value=statistics.quantiles(latencies_ms, n=100)[98], op="<=", bar=50),
        Bar(name="cache_hits_per_s", value=statistics.median(hits), op=">=", bar=30_000),
    ]
    _line.report("reward_plane", bars=bars, pairs=rounds, packages=("grpcio", "aiohttp"), quiet=options.json)


if __name__ == "__main__":
    main()
