"""How the gateway holds when the fleet grows: `python -m benchmarks.fleet --json`.

A gateway process, one emulated rank that takes and closes batches as they come, and 32, 64 and 128 emulated actors in processes of their
own, each with its own channel, attendance and submission stream. First the gateway's capacity is measured: actors that draw in no time.
Then every actor draws at a fixed rate, so that 128 of them load the gateway with 60 % of its capacity, and the samples that the rank gets
are counted.

eff_64, eff_128      samples a second per actor, over the same at 32 actors; medians over rounds of 32, 64 and 128 in turn
trainer_cpu_share    processor time of the rank's process that goes into taking, checking and decoding batches, over wall time, at 128
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import _line
from benchmarks._emulated import VOCABULARY, Rank, Replica, config_in, cpu_s, end_process_on_failure, finished, gateway
from benchmarks._line import Bar, Pair
from learner.config import LearnerConfig
from learner.gateway.window import max_open
from protos.arrays import pack_floats, pack_ids
from protos.lifeline import die_with_parent
from protos.trajectory.v1alpha1 import trajectory_pb2

P, G = 16, 8
PROMPT_TOKENS, COMPLETION_TOKENS = 64, 256
ACTORS = (32, 64, 128)
# Every actor holds a group while it draws, so the account must let as many be open: (S + 1) P - (W - 1) = 17 * 16 - 64 = 208, of which
# two batches may be complete or in training. With S = 8 it lets 80 be open, and the last 48 of 128 actors wait for a lease by rule.
MAX_STALENESS, WINDOW = 16, 4 * P + 1
assert max_open(groups_per_step=P, max_staleness=MAX_STALENESS, window=WINDOW) >= max(ACTORS) + 2 * P
NUM_PROCESSES = 2  # of actors
CAPACITY_S, WARM_S, ROUND_S = 4.0, 1.5, 4.5
LOAD_AT_128 = 0.6


def sample() -> trajectory_pb2.Trajectory:
    drawn = np.random.default_rng(1)
    return trajectory_pb2.Trajectory(
        completion_ids=pack_ids(drawn.integers(0, VOCABULARY, COMPLETION_TOKENS)), logprobs=pack_floats(-drawn.exponential(size=COMPLETION_TOKENS)),
        spans=[trajectory_pb2.VersionSpan(version=1, start=0, end=COMPLETION_TOKENS)], finish_reason=trajectory_pb2.FINISH_REASON_STOP,
        reward=trajectory_pb2.Reward(score=trajectory_pb2.Score(value=1.0), scorer="main"), text="x" * 1000,
    )  # fmt: skip


class Actor:
    """Draws a group's samples at a rate, or (rate 0) at once. The rate may change; what is lent is always finished."""

    def __init__(self, address: str, config: LearnerConfig, name: str) -> None:
        self.replica = Replica(address, config, name)
        self.groups_per_s = 0.0
        self._sample = sample()
        self._working: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    async def start(self, groups_per_s: float) -> None:
        self.groups_per_s = groups_per_s
        await self.replica.attend()
        self._working = asyncio.create_task(self._work())
        self._working.add_done_callback(end_process_on_failure)

    async def stop(self) -> None:
        """Whatever it holds is lent to others."""
        if self._working is not None:
            ending = [self._working, *self._under_way]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
        await self.replica.leave()

    async def _work(self) -> None:
        """For ever. The next group is due 1 / groups_per_s after the one before was, however long submitting took."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            leases = await self.replica.lease(1)
            if self.groups_per_s:
                due_s = max(due_s, loop.time() - 1.0) + random.uniform(0.5, 1.5) / self.groups_per_s
                await asyncio.sleep(max(0.0, due_s - loop.time()))
            for sample in finished(leases, [self._sample], self.replica.loaded_version):
                self._under_way.add(task := asyncio.create_task(self.replica.submit(sample)))
                task.add_done_callback(self._under_way.discard)
            if not self.groups_per_s:
                await asyncio.gather(*self._under_way)


async def act(pipe: Connection, address: str, config: LearnerConfig, name: str) -> None:
    """Serves (number of actors, groups a second of each) from the pipe until None."""
    loop = asyncio.get_running_loop()
    actors: list[Actor] = []
    while (order := await loop.run_in_executor(None, pipe.recv)) is not None:
        number, rate = order
        for actor in actors:
            actor.groups_per_s = rate
        while len(actors) < number:
            actors.append(Actor(address, config, f"{name}-{len(actors)}"))
            await actors[-1].start(rate)
        while len(actors) > number:
            await actors.pop().stop()
        pipe.send(number)
    for actor in actors:
        await actor.stop()


def actor_process(pipe: Connection, address: str, folder: str, name: str, parent: int) -> None:
    die_with_parent(parent)
    uvloop.run(act(pipe, address, LearnerConfig.model_validate_json((Path(folder) / "run" / "learner.json").read_text()), name))


async def train(pipe: Connection, address: str, folder: Path) -> None:
    """A rank that trains in no time. On the pipe it says how many samples it has, since when (at the last batch), and its processor time."""
    rank = Rank(address, folder)
    await rank.register()
    loop = asyncio.get_running_loop()
    told = {"samples": 0.0, "at_s": time.perf_counter()}

    async def answer() -> None:
        while await loop.run_in_executor(None, pipe.recv) is not None:
            pipe.send(dict(told, cpu_s=time.process_time()))

    async def steps() -> None:
        step = 0
        while True:
            _, rows = await rank.take(step)
            told.update(samples=told["samples"] + len(rows), at_s=time.perf_counter())
            step += 1
            await rank.close(step)

    stepping = asyncio.create_task(steps())
    await asyncio.wait({stepping, asyncio.create_task(answer())}, return_when=asyncio.FIRST_COMPLETED)
    if stepping.done():
        stepping.result()
    stepping.cancel()
    await rank.leave()


def rank_process(pipe: Connection, address: str, folder: str, parent: int) -> None:
    die_with_parent(parent)
    uvloop.run(train(pipe, address, Path(folder)))


class Fleet:
    """The actor processes and the rank's."""

    def __init__(self, address: str, folder: Path, spawn: Any, gateway_cpu: Any) -> None:
        self._gateway_cpu = gateway_cpu
        self._actors, self._processes = [], []
        for number in range(NUM_PROCESSES):
            ours, theirs = spawn.Pipe()
            self._actors.append(ours)
            self._processes.append(spawn.Process(target=actor_process, args=(theirs, address, str(folder), f"a{number}", os.getpid()), daemon=True))
        self._rank, theirs = spawn.Pipe()
        self._processes.append(spawn.Process(target=rank_process, args=(theirs, address, str(folder), os.getpid()), daemon=True))
        for process in self._processes:
            process.start()

    def rate(self, num_actors: int, groups_per_s: float, seconds: float) -> Pair:
        """Sets the fleet to work and counts after a warm-up: samples a second, the rank's and the gateway's processor shares."""
        for pipe in self._actors:
            pipe.send((num_actors // NUM_PROCESSES, groups_per_s))
        for pipe in self._actors:
            if not pipe.poll(60):
                raise RuntimeError("an actor process does not answer")
            pipe.recv()
        self._until_next_batch()
        time.sleep(WARM_S)
        before, gateway_s, actors_s, began_s = self._ask(), self._gateway_cpu(), self._actors_cpu_s(), time.perf_counter()
        time.sleep(seconds)
        after, took_s = self._ask(), time.perf_counter() - began_s
        if after["samples"] == before["samples"]:
            raise RuntimeError(f"{num_actors} actors: no batch in {took_s:.1f} s")
        return {
            "samples_per_s": (after["samples"] - before["samples"]) / (after["at_s"] - before["at_s"]),  # from batch to batch
            "trainer_cpu_share": (after["cpu_s"] - before["cpu_s"]) / took_s,
            "gateway_cpu_share": (self._gateway_cpu() - gateway_s) / took_s,
            "actors_cpu_share": (self._actors_cpu_s() - actors_s) / took_s,
        }

    def _actors_cpu_s(self) -> float:
        """Processor seconds of the emulated actors, all together."""
        return sum(cpu_s(process.pid) for process in self._processes[:NUM_PROCESSES])

    def _until_next_batch(self, limit_s: float = 60.0) -> None:
        """Whatever was asked for is at work. Raises RuntimeError when nothing comes."""
        began, end_s = self._ask()["samples"], time.monotonic() + limit_s
        while self._ask()["samples"] == began:
            ended = {process.name: process.exitcode for process in self._processes if not process.is_alive()}
            if ended or time.monotonic() > end_s:
                raise RuntimeError(f"no batch came in {limit_s} s; processes that ended: {ended}")
            time.sleep(0.05)

    def _ask(self) -> dict[str, float]:
        self._rank.send(True)
        if not self._rank.poll(30):
            raise RuntimeError("the rank does not answer")
        return dict(self._rank.recv())

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def measure(folder: Path, num_pairs: int) -> tuple[list[Pair], dict[str, float]]:
    config = config_in(
        folder, prompt_tokens=PROMPT_TOKENS, groups_per_step=P, sampling={"group_size": G, "max_new_tokens": COMPLETION_TOKENS},
        staleness={"max_staleness": MAX_STALENESS, "window": WINDOW}, lease={"heartbeat_s": 1.0, "silence_s": 60.0, "lapse_s": 600.0},
    )  # fmt: skip
    with gateway(config) as process:
        fleet = Fleet(process.address, folder, multiprocessing.get_context("spawn"), process.cpu_s)
        try:
            capacity = statistics.median(fleet.rate(128, 0.0, CAPACITY_S / 2)["samples_per_s"] for _ in range(3))
            groups_per_s = LOAD_AT_128 * capacity / 128 / G
            pairs = []
            for _ in range(num_pairs):
                seen = {number: fleet.rate(number, groups_per_s, ROUND_S) for number in ACTORS}
                pairs.append(
                    {f"per_actor_{number}": seen[number]["samples_per_s"] / number for number in ACTORS}
                    | {"trainer_cpu_share": seen[128]["trainer_cpu_share"], "gateway_cpu_share": seen[128]["gateway_cpu_share"], "actors_cpu_share": seen[128]["actors_cpu_share"]}
                )
        finally:
            fleet.stop()
    return pairs, {"capacity_samples_per_s": round(capacity, 1), "asked_per_actor": round(groups_per_s * G, 3)}


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-fleet-"))
    try:
        pairs, notes = measure(folder, max(options.pairs, _line.MIN_PAIRS))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bars = [
        Bar(name="eff_64", value=_line.ratio(pairs, "per_actor_64", "per_actor_32"), op=">=", bar=0.97),
        Bar(name="eff_128", value=_line.ratio(pairs, "per_actor_128", "per_actor_32"), op=">=", bar=0.95),
        Bar(name="trainer_cpu_share", value=statistics.median(pair["trainer_cpu_share"] for pair in pairs), op="<=", bar=0.05),
    ]
    _line.report("fleet", bars=bars, pairs=pairs, packages=("grpcio", "uvloop"), quiet=options.json, notes=notes)


if __name__ == "__main__":
    main()
