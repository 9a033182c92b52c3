"""The gateway process: `python -m learner.gateway --config FILE`, started by the learner beside its trainer ranks."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
import uuid
from pathlib import Path

import uvloop

from learner.config import LearnerConfig
from learner.gateway.gateway import Gateway, write_whole
from learner.gateway.journal import JournalFailed
from learner.gateway.segments import JournalDamaged
from learner.process import complain, die_with_parent, log_to_stderr, read_config
from protos import faultpoints
from protos.identity import resolve_model

SWITCH_S = 0.0005  # the journal's thread waits at most so long for the interpreter's lock between write and sync; Python's own 5 ms is a sync's time
GC_THRESHOLDS = (20_000, 20, 100)  # the account holds many small objects and no cycles


def run_id_of(config: LearnerConfig) -> str:
    """The run's id: made at its first start and kept in the run folder. Raises ValueError when the folder holds another run."""
    path = config.run_dir / "run_id"
    kept = path.read_text().strip() if path.is_file() else ""
    if kept and config.run_id and kept != config.run_id:
        raise ValueError(f"run_id={config.run_id}, but {config.run_dir} holds run {kept}; use another run_dir, or leave run_id empty to go on with it")
    run_id = kept or config.run_id or uuid.uuid4().hex[:12]
    if run_id != kept:
        write_whole(path, run_id)
    return run_id


async def serve(config: LearnerConfig) -> None:
    """Serves until SIGTERM, SIGINT or the end of the run."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GC_THRESHOLDS)
    await Gateway(config, resolve_model(config.model), run_id_of(config)).run(stopping)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m learner.gateway", description="Serves one run's account to actors and trainer ranks.", epilog="example: python -m learner.gateway --config runs/r1/resolved/learner.json")
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file of LearnerConfig")
    arguments = parser.parse_args()
    die_with_parent(os.getppid())
    log_to_stderr()
    try:
        faultpoints.check()
        uvloop.run(serve(read_config(arguments.config)))
    except (ValueError, FileNotFoundError, JournalDamaged) as error:
        return complain(str(error))
    except JournalFailed as error:
        complain(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
