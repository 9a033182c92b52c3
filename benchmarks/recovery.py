"""A whole run whose processes are killed at random: `python -m benchmarks.recovery --json`.

Real processes: learner (supervisor, gateway, one rank), reward server, two replicas of the small engine, a tiny model. SIGKILL hits the
gateway first, then the gateway, the rank or a replica, chosen by a seed that is printed; the supervisor brings its children back, this program the replicas.
The next kill comes when at least 20 times the restart time of the last has passed since it.

goodput           1 − (what the kills cost) / (time from the first kill on, the last pause counted whole). A kill costs what passes until the run is a step further than
                  it was, less a step's mean time without kills: waiting, starting, and training steps again that came after the cut
lost, twice       groups, read from the raw journal and the trainer's own record of what it trained (benchmarks/_account.py)
gateway_back_s    longest time from the gateway's SIGKILL to the first answer of the new one
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import _account, _line
from benchmarks._emulated import environment
from benchmarks._line import ROOT, Bar, Pair
from deploy.models import tiny
from learner.gateway.window import max_open
from protos import rpc
from protos.learner.v1alpha1 import learner_pb2, learner_pb2_grpc

P, G, S = 4, 4, 2
CHECKPOINT_EVERY = 4
KINDS = ("gateway", "rank", "replica")
PAUSE_PER_RESTART = 20
START_LIMIT_S = 120.0
Answer = TypeVar("Answer")


def until(question: Callable[[], Answer | None], what: str, limit_s: float = START_LIMIT_S, every_s: float = 0.02) -> Answer:
    """The first true answer. Raises RuntimeError when none comes in time."""
    end_s = time.monotonic() + limit_s
    while not (answer := question()):
        if time.monotonic() > end_s:
            raise RuntimeError(f"waited {limit_s} s in vain for {what}")
        time.sleep(every_s)
    return answer


class Run:
    """All processes of one run in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._model = str(tiny(folder / "model"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        (self.folder / "scorers_of_recovery.py").write_text("def letters(prompt, completion, fields):\n    return sum(c.islower() for c in completion) / max(1, len(completion))\n")
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"count from {i} to {i + 3}: "}) + "\n" for i in range(64)))
        self._spawn("reward", "reward_server", {"address": "127.0.0.1:0", "scorers": [{"name": "main", "use": "scorers_of_recovery:letters"}]}, "--address-file", str(self.folder / "reward.address"))
        self._spawn("learner", "learner", {
            "run_dir": str(self.run_dir), "model": self._model, "address": self.address, "steps": 100_000, "groups_per_step": P, "seed": 3,
            "data": {"prompts": str(self.folder / "prompts.jsonl"), "template": "raw"}, "sampling": {"group_size": G, "max_new_tokens": 24},
            "staleness": {"max_staleness": S}, "lease": {"lapse_s": 60, "heartbeat_s": 0.3, "silence_s": 3}, "optimizer": {"lr": 1e-4},
            "trainer": {"threads": 1, "device": "cpu"}, "checkpoint": {"every_steps": CHECKPOINT_EVERY},
            "push": {"collective_timeout_s": 5, "deadline_s": 15, "prepare_s": 2, "bucket_bytes": 1 << 16},
        })  # fmt: skip
        for name in ("a", "b"):
            self.start_replica(name)

    def start_replica(self, name: str) -> None:
        reward = until(lambda: self._read("reward.address"), "the reward server")
        self._spawn(name, "rollout_server", {
            "model": self._model, "learner": self.address, "rewards": [reward], "replica_id": name, "engine": "small",
            "max_model_len": 256, "max_num_seqs": 16, "kv_cache_bytes": 64 << 20, "threads": 1,
        })  # fmt: skip

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text().strip() if path.exists() else ""

    def _spawn(self, name: str, module: str, config: dict[str, Any], *more: str) -> None:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        paths = {**environment(), "PYTHONPATH": os.pathsep.join((str(ROOT), str(self.folder)))}
        with (self.folder / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen([sys.executable, "-m", module, "--config", str(path), *more], cwd=self.folder, env=paths, stdout=output, stderr=output, start_new_session=True)

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []

    def step(self) -> int:
        """Newest step that was trained, ever."""
        return max((line["step"] for line in self.metrics()), default=0)

    def status(self) -> learner_pb2.GetStatusResponse | None:
        async def ask() -> learner_pb2.GetStatusResponse:
            async with rpc.channel(self.address) as channel:
                answer: learner_pb2.GetStatusResponse = await learner_pb2_grpc.LearnerServiceStub(channel).GetStatus(learner_pb2.GetStatusRequest(), timeout=1.0)
                return answer

        with contextlib.suppress(Exception):  # whatever it is, there is no answer yet
            return asyncio.run(ask())
        return None

    def child(self, module: str) -> int:
        """Process id of the supervisor's child that runs a module; 0 while there is none."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.processes["learner"].pid and module.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    return int(entry.name)
        return 0

    def stop(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def running() -> Iterator[Run]:
    folder = Path(tempfile.mkdtemp(prefix="headrace-recovery-"))
    run = Run(folder)
    try:
        run.start()
        yield run
    except BaseException:
        for log in [*folder.glob("*.log"), *folder.glob("run/logs/*.log")]:
            sys.stderr.write(f"===== {log.name}\n{log.read_text(errors='replace')[-1500:]}\n")
        raise
    finally:
        run.stop()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One kill and what it cost. restart_s: until what was killed answers, has trained, or attends again."""

    kind: str
    restart_s: float
    cost_s: float


def kill(run: Run, kind: str, step_s: float) -> Kill:
    """Kills, waits until the run is a step further than before and the killed is back."""
    before, began_s = run.step(), time.monotonic()
    restart_s = {"gateway": _kill_gateway, "rank": _kill_rank, "replica": _kill_replica}[kind](run)
    until(lambda: run.step() > before, f"a step after the {kind} was killed at step {before}")
    further_s = time.monotonic() - began_s
    return Kill(kind=kind, restart_s=restart_s or further_s, cost_s=max(0.0, further_s - step_s) if kind != "replica" else max(0.0, _first_step_s(run, before, began_s) - step_s))


def _first_step_s(run: Run, before: int, began_s: float) -> float:
    """Seconds to the first step beyond `before`, from when its metrics were written."""
    wall_began = time.time() - (time.monotonic() - began_s)
    written: float = next(line["time_s"] for line in run.metrics() if line["step"] > before)
    return max(0.0, written - wall_began)


def _kill_gateway(run: Run) -> float:
    os.kill(until(lambda: run.child("learner.gateway"), "the gateway's process"), signal.SIGKILL)
    began_s = time.monotonic()
    until(run.status, "the gateway's answer")
    return time.monotonic() - began_s


def _kill_rank(run: Run) -> float:
    os.kill(until(lambda: run.child("learner.trainer"), "the rank's process"), signal.SIGKILL)
    return 0.0  # it is back when it has trained a step


def _kill_replica(run: Run) -> float:
    process = run.processes["a"]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    began_s = time.monotonic()
    run.start_replica("a")
    until(lambda: (status := run.status()) and any(each.replica_id == "a" and each.attending and each.loaded_version for each in status.replicas), "the replica")
    return time.monotonic() - began_s


def measure(run: Run, *, seed: int, num_kills: int, limit_s: float) -> tuple[list[Kill], float, float, float]:
    """(kills, a step's mean seconds without kills, seconds from the first kill to the end of the last pause, seconds of that pause
    that were not waited for: nothing is killed in them)."""
    started_s = time.monotonic()
    until(lambda: run.step() >= 2, "the first steps")
    began_s, began = time.monotonic(), run.step()
    until(lambda: run.step() >= began + 8, "eight steps without kills", every_s=0.05)
    step_s = (time.monotonic() - began_s) / (run.step() - began)
    chosen = random.Random(seed)
    order = ["gateway", *(chosen.choice(KINDS) for _ in range(num_kills - 1))]
    kills: list[Kill] = []
    first_s = next_s = time.monotonic()
    for kind in order:
        at_s = time.monotonic()
        kills.append(kill(run, kind, step_s))
        next_s = at_s + PAUSE_PER_RESTART * kills[-1].restart_s * chosen.uniform(1.0, 1.1)
        time.sleep(max(0.0, min(next_s, started_s + limit_s) - time.monotonic()))
        if next_s > started_s + limit_s:
            break
    return kills, step_s, next_s - first_s, max(0.0, next_s - time.monotonic())


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=170.0, help="the run ends then, inside a pause; six kills with the full pauses need about 900")
    options = parser.parse_args()
    with running() as run:
        kills, step_s, seconds, cut_s = measure(run, seed=options.seed, num_kills=options.kills, limit_s=options.limit_s)
        reading = _account.read(run.run_dir)
        wrong = _account.trained_otherwise(reading, run.run_dir)
    pairs: list[Pair] = [{f"{each.kind}_restart_s": each.restart_s, "cost_s": each.cost_s} for each in kills]
    lost = reading.lost(max_open=max_open(groups_per_step=P, max_staleness=S, window=1))
    gateway_s = [each.restart_s for each in kills if each.kind == "gateway"]
    bars = [
        Bar(name="goodput", value=1 - sum(each.cost_s for each in kills) / seconds, op=">=", bar=0.90),
        Bar(name="lost", value=lost, op="==", bar=0),
        Bar(name="twice", value=reading.twice() + wrong, op="==", bar=0),
        Bar(name="gateway_back_s", value=max(gateway_s, default=float("nan")), op="<=", bar=2),
    ]
    notes = {"seed": options.seed, "kills": [each.kind for each in kills], "step_s": round(step_s, 3), "seconds": round(seconds, 1), "of_these_not_waited_for_s": round(cut_s, 1), "groups_trained": sum(reading.trained().values()), "median_cost_s": round(statistics.median(each.cost_s for each in kills), 2)}
    _line.report("recovery", bars=bars, pairs=pairs, packages=("torch", "grpcio"), quiet=options.json, notes=notes)


if __name__ == "__main__":
    main()
