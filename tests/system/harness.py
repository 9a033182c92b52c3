"""Whole runs for tests: real processes, real gRPC, faults by signal. Each service gets a process session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from protos import rpc
from protos.learner.v1alpha1 import learner_pb2, learner_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
Answer = TypeVar("Answer")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(
    what: str, question: Callable[[], Answer | None], *, limit_s: float, every_s: float = 0.1, guard: Callable[[], None] = lambda: None
) -> Answer:
    """Asks until the answer is true. Raises AssertionError saying what was waited for once limit_s has passed."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        answer = question()
        if answer:
            return answer
        guard()
        time.sleep(every_s)
    raise AssertionError(f"waited {limit_s} s in vain for: {what}")


@dataclass(kw_only=True)
class Service:
    """One service process and everything below it."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    address_file: Path | None = None

    def signal(self, number: int) -> None:
        """To the whole session: the service and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def alive(self) -> bool:
        return self.process.poll() is None

    def address(self, limit_s: float = 120) -> str:
        """host:port once it is bound."""
        path = self.address_file
        assert path is not None, f"{self.name} was started without an address file"
        return wait_for(f"the address of {self.name}", lambda: path.read_text().strip() if path.exists() else None, limit_s=limit_s, guard=self.must_live)

    def must_live(self) -> None:
        if not self.alive():
            raise AssertionError(f"{self.name} exited with {self.process.returncode}:\n{self.tail()}")

    def tail(self, num_chars: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-num_chars:] if self.log.exists() else ""


@dataclass(kw_only=True)
class Run:
    """A run in a folder. Example: `run.start_reward(); run.start_learner(); run.start_rollout("a"); run.wait_steps(3)`."""

    folder: Path
    model: Path
    port: int = field(default_factory=free_port)
    services: dict[str, Service] = field(default_factory=dict)
    learner_config: dict[str, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(
        self, name: str, module: str, config: dict[str, Any], env: dict[str, str], address_file: bool,
        *, prefix: Sequence[str] = (), arguments: Sequence[str] = (),
    ) -> Service:  # fmt: skip
        """prefix: a command that runs the service; arguments: more of the service's."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        command = [*prefix, sys.executable, "-m", *module.split(), "--config", str(path), *arguments]
        listen = self.folder / f"{name}.address"
        listen.unlink(missing_ok=True)
        if address_file:
            command += ["--address-file", str(listen)]
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))), "OMP_NUM_THREADS": "1", **env},
            )
        service = Service(name=name, process=process, log=log, address_file=listen if address_file else None)
        self.services[name] = service
        return service

    def start_reward(self, scorer: str = "tests.system.scorers:even_length", **settings: Any) -> Service:
        config = {"address": "127.0.0.1:0", "scorers": [{"name": "main", "use": scorer}], **settings}
        return self.start("reward", "reward_server", config, {}, address_file=True)

    def start_learner(self, env: dict[str, str] | None = None, *, prefix: Sequence[str] = (), arguments: Sequence[str] = (), **settings: Any) -> Service:
        """The same settings again on a restart unless told otherwise. prefix, arguments: see start."""
        self.learner_config = _merge(_merge(self.defaults(), self.learner_config), settings)
        return self.start("learner", "learner", self.learner_config, env or {}, address_file=False, prefix=prefix, arguments=arguments)

    def defaults(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir), "model": str(self.model), "address": self.address, "steps": 1000, "groups_per_step": 2, "seed": 3,
            "data": {"prompts": str(self.prompts()), "template": "raw"},
            "sampling": {"group_size": 4, "max_new_tokens": 16},
            "staleness": {"max_staleness": 1},
            "lease": {"lapse_s": 60, "heartbeat_s": 0.3, "silence_s": 3},
            "optimizer": {"lr": 1e-3},
            "trainer": {"threads": 1, "device": "cpu"},
            "checkpoint": {"every_steps": 2},
            "push": {"collective_timeout_s": 5, "deadline_s": 15, "prepare_s": 2, "bucket_bytes": 1 << 16},
        }

    def prompts(self) -> Path:
        path = self.folder / "prompts.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps({"prompt": f"count from {i} to {i + 3}: ", "answer": str(i)}) + "\n" for i in range(64)))
        return path

    def start_rollout(self, name: str, engine: str = "small", env: dict[str, str] | None = None, **settings: Any) -> Service:
        config = {
            "model": str(self.model), "learner": self.address, "rewards": [self.services["reward"].address()], "replica_id": name, "engine": engine,
            "max_model_len": 256, "max_num_seqs": 16, "kv_cache_bytes": 64 << 20, "threads": 1, **settings,
        }
        return self.start(name, "rollout_server", config, env or {}, address_file=True)

    def status(self) -> learner_pb2.GetStatusResponse | None:
        """The gateway's status; None while it does not answer."""

        async def ask() -> learner_pb2.GetStatusResponse:
            async with rpc.channel(self.address) as channel:
                return await learner_pb2_grpc.LearnerServiceStub(channel).GetStatus(learner_pb2.GetStatusRequest(), timeout=3)

        with contextlib.suppress(Exception):
            return asyncio.run(ask())
        return None

    def replica(self, name: str) -> learner_pb2.GetStatusResponse.Replica | None:
        status = self.status()
        return next((r for r in status.replicas if r.replica_id == name), None) if status else None

    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl so far."""
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_steps(self, num_steps: int, limit_s: float = 120) -> list[dict[str, Any]]:
        """Until metrics.jsonl has that many lines; every started service must live meanwhile unless it was killed on purpose."""
        return wait_for(
            f"{num_steps} steps (have {len(self.metrics())})", lambda: m if len(m := self.metrics()) >= num_steps else None,
            limit_s=limit_s, guard=self.learner_must_live,
        )

    def saved_steps(self) -> set[int]:
        """Policy steps of which a whole cut lies on disk, and 0, the base."""
        return {0, *(int(marker.parent.name.removeprefix("step-")) for marker in (self.run_dir / "checkpoints").glob("step-*/cut.json"))}

    def learner_must_live(self) -> None:
        if "learner" in self.services:
            self.services["learner"].must_live()

    def stop(self) -> None:
        """Ends everything; orderly first, so that a test sees a service that cannot."""
        for service in self.services.values():
            service.signal(signal.SIGCONT)
            service.signal(signal.SIGTERM)
        end = time.monotonic() + 10
        for service in self.services.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.process.wait(max(0.1, end - time.monotonic()))
            service.signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.process.wait(5)


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`change` over `base`, section by section."""
    merged = dict(base)
    for key, value in change.items():
        merged[key] = _merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged


@contextlib.contextmanager
def running(folder: Path, model: Path) -> Iterator[Run]:
    """A run that is ended whatever happens; on failure the ends of all logs are shown."""
    run = Run(folder=folder, model=model)
    try:
        yield run
    except BaseException:
        for service in run.services.values():
            sys.stderr.write(f"\n===== {service.name} =====\n{service.tail()}\n")
        raise
    finally:
        run.stop()


def process_tree(pid: int) -> list[int]:
    """pid and all its descendants, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    tree, queue = [], [pid]
    while queue:
        tree.append(queue.pop())
        queue.extend(children.get(tree[-1], []))
    return tree


def pids_running(module: str, session: int) -> list[int]:
    """Processes of a session whose command line names `-m module`."""
    found = []
    for pid in process_tree(session):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if module.encode() in words:
                found.append(pid)
    return found
