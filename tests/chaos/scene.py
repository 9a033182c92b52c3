"""A run in which anything may be broken: two small-engine replicas behind proxies, a run folder that can be full, a clock that jumps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.proxy import Proxy
from tests.redis_server import RedisServer
from tests.system.harness import ROOT, Run, Service, free_port, pids_running, running

LOG_CHARS = 12_000
REPLICAS = ("one", "two")
DISK_BYTES = 256 << 20
SEGMENT_BYTES = 64 << 10  # so that segments come and go
LEAVE_S = 600  # for ranks that are told to stop while they are starting, on cores that others use
KINDS = ("gateway", "rank", "replica", "reward")


@dataclass(kw_only=True)
class Scene:
    """run: of tests/system/harness.py. ranks: trainer ranks. Everything is started by `start`, and again by `revive` where it is dead."""

    run: Run
    ranks: int
    redis: RedisServer | None  # None: the journal is in segments, which are short here
    patience_s: float = 120.0  # for the run to get over a fault; more on a machine on which it began slowly
    reward_port: int = field(default_factory=free_port)
    proxies: dict[str, Proxy] = field(default_factory=dict)

    @property
    def fault_file(self) -> Path:
        return self.run.folder / "fault"

    @property
    def clock_file(self) -> Path:
        return self.run.folder / "clock"

    @property
    def env(self) -> dict[str, str]:
        return {
            "PYTHONPATH": f"{ROOT / 'tests/chaos/plugins'}:{ROOT}",
            "HEADRACE_FAULT_FILE": str(self.fault_file),
            "HEADRACE_CLOCK_FILE": str(self.clock_file),
        }

    @property
    def journal(self) -> dict[str, Any]:
        return {"backend": "redis", "url": self.redis.url} if self.redis else {"segment_bytes": SEGMENT_BYTES}

    def start(self) -> None:
        for name in REPLICAS:
            self.proxies[name] = Proxy(self.run.port, free_port())
        self.revive()

    def revive(self) -> list[str]:
        """Starts what is not running, as whoever deploys it would; names of what was started."""
        starts: dict[str, Callable[[], None]] = {"reward": self._start_reward, "learner": self._start_learner, **{name: partial(self._start_replica, name) for name in REPLICAS}}
        dead = [name for name in starts if name not in self.run.services or not self.run.services[name].alive()]
        for name in dead:
            if name in self.run.services:
                self.run.services[name].kill()  # its children, where any are left
            starts[name]()
        return dead

    def _start_reward(self) -> None:
        self.run.start_reward(address=f"127.0.0.1:{self.reward_port}")
        self.run.services["reward"].address()

    def _start_learner(self) -> None:
        self.run.start_learner(
            self.env, steps=1_000_000, trainer={"ranks": self.ranks}, checkpoint={"every_steps": 3, "leave_s": LEAVE_S}, sampling={"group_size": 2, "max_new_tokens": 12},
            staleness={"max_staleness": 2, "window": 2}, lease={"lapse_s": 30, "max_attempts": 20}, journal=self.journal,
        )

    def _start_replica(self, name: str) -> None:
        settings = {"learner": f"127.0.0.1:{self.proxies[name].port}"}
        self.run.start_rollout(name, env=self.env, **settings)

    def pids(self, kind: str) -> list[int]:
        """Processes that may be killed alone."""
        learner = self.run.services["learner"].process.pid
        if kind == "gateway":
            return pids_running("learner.gateway", learner)
        if kind == "rank":
            return pids_running("learner.trainer", learner)
        names = REPLICAS if kind == "replica" else ("reward",)
        return [self.run.services[name].process.pid for name in names if self.run.services[name].alive()]

    def signal(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def show_logs(self) -> None:
        for path in sorted((self.run.run_dir / "logs").glob("*.log")):
            sys.stderr.write(f"\n===== {path.name} =====\n{path.read_text(errors='replace')[-LOG_CHARS:]}\n")

    def step(self) -> int:
        """Highest policy step in the metrics."""
        return max((line["step"] for line in self.run.metrics()), default=0)

    def services(self) -> list[Service]:
        return list(self.run.services.values())

    def resume_all(self) -> None:
        for service in self.services():
            service.signal(signal.SIGCONT)


@contextmanager
def scene(folder: Path, model: Path, *, ranks: int, redis: bool) -> Iterator[Scene]:
    """Ended, unmounted and emptied whatever happens. Needs root: the run folder is a small file system of its own."""
    with running(folder, model) as run:
        run.run_dir.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "headrace-chaos", str(run.run_dir)], check=True)
        server = RedisServer(folder / "redis") if redis else None
        made = Scene(run=run, ranks=ranks, redis=server)
        try:
            if server:
                server.start()
            made.start()
            yield made
        except BaseException:
            made.show_logs()  # they are gone with the file system
            raise
        finally:
            made.resume_all()
            run.stop()
            for proxy in made.proxies.values():
                proxy.stop()
            if server:
                server.__exit__()
            subprocess.run(["umount", "-l", str(run.run_dir)], check=True)
