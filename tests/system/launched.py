"""A run launched by `headrace launch` in a process of its own, with the small engine, watched by a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from protos.stacks import RUN_VARIABLE
from tests.prometheus_server import with_us
from tests.system.harness import ROOT, wait_for

# 5 minutes become 15 s, and what holds for 10 minutes holds for 30 s
ALARMS = {"every_s": 1.0, "patience": 0.05, "stalled_s": 15.0, "diagnose_every_s": 20.0}


def run_file(folder: Path, model: Path, *, learner: dict[str, Any] | None = None, **sections: Any) -> Path:
    """Two replicas that have more to draw than the trainer to train."""
    prompts = folder / "train.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count from {i} to {i + 3}: ", "slow_while": str(folder / "slow_reward")}) + "\n" for i in range(64)))
    content: dict[str, Any] = {
        "run_dir": str(folder / "run"), "model": str(model),
        "learner": {
            "steps": 100_000, "groups_per_step": 2, "sampling": {"group_size": 4, "max_new_tokens": 48}, "optimizer": {"lr": 1e-4},
            "data": {"prompts": str(prompts), "template": "raw"}, "staleness": {"max_staleness": 1}, "trainer": {"threads": 1, "device": "cpu"},
            "lease": {"heartbeat_s": 0.5, "silence_s": 5}, "checkpoint": {"every_steps": 50}, "alarms": ALARMS, **(learner or {}),
        },
        "rollout": {"engine": "small", "replicas": 2, "max_model_len": 256, "max_num_seqs": 8, "threads": 1, "score_timeout_s": 60},
        "reward": {"scorers": [{"name": "main", "use": "tests.system.scorers:slow_when_told", "limit_s": 50}]},
        "observability": {"scrape_s": 1.0}, **sections,
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


class Launched:
    """Example: `with launched(file, HEADRACE_FAULT_FILE=str(fault)) as run: run.wait_steps(3)`"""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self.process, self.run_dir, self.log = process, run_dir, log

    def steps(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n") and '"evaluation"' not in line]

    def wait_steps(self, more: int, limit_s: float = 200) -> None:
        before = len(self.steps())
        wait_for(f"{more} more steps", lambda: len(self.steps()) >= before + more, limit_s=limit_s, guard=self.must_live)

    def must_live(self) -> None:
        assert self.process.poll() is None, self.log.read_text()[-4000:]

    def alarms(self) -> list[dict[str, Any]]:
        path = self.run_dir / "alarms.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def firing(self) -> set[str]:
        """Names that began and did not end, as the gateway told."""
        last = {(line["alarm"], json.dumps(line["labels"], sort_keys=True)): line["fires"] for line in self.alarms()}
        return {alarm for (alarm, _), fires in last.items() if fires}

    def diagnosis_of(self, alarm: str, *, after_s: float) -> str | None:
        """Text of the newest verdict that this alarm began or is named in, made after a time; None: there is none yet."""
        for folder in sorted((self.run_dir / "diagnosis").glob("[0-9]*"), key=lambda folder: folder.stat().st_mtime, reverse=True):
            text = (folder / "verdict.txt").read_text()
            if folder.stat().st_mtime >= after_s and f"  {alarm}:" in text:
                return text
        return None

    def pid_of(self, name: str) -> int:
        """The process of a service, whose configuration is resolved/launch/NAME.json."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and f"{self.run_dir}/resolved/launch/{name}.json".encode() in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        raise AssertionError(f"no process of {name}")


@contextlib.contextmanager
def launched(file: Path, **environment: str) -> Iterator[Launched]:
    """Launches, and ends everything whatever happens; on failure the ends of the logs are shown."""
    run_dir, log = Path(yaml.safe_load(file.read_text())["run_dir"]), file.with_suffix(".log")
    with log.open("ab") as output:
        process = subprocess.Popen([*with_us(), sys.executable, "-m", "deploy.cli", "launch", str(file)], cwd=ROOT, stdout=output, stderr=output, start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})
    try:
        yield Launched(process, run_dir, log)
    except BaseException:
        for each in [log, *sorted((run_dir / "logs").glob("*.log"))]:
            sys.stderr.write(f"\n===== {each.name} =====\n{each.read_text(errors='replace')[-3000:]}\n")
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(90)
        _kill_rest(run_dir)


def _kill_rest(run_dir: Path) -> None:
    """What an ended launcher may have left, by the run's own name in its environment."""
    end_s = time.monotonic() + 5
    while time.monotonic() < end_s:
        left = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _environ(entry).get(RUN_VARIABLE) == str(run_dir.resolve())]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _environ(entry: Path) -> dict[str, str]:
    try:
        parts = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(part.split("=", 1) for part in parts if "=" in part)
