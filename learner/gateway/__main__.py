"""The gateway process: `python -m learner.gateway --config FILE`, started by the learner beside its trainer ranks."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

import uvloop

from learner.config import LearnerConfig
from learner.gateway.founding import run_id_of
from learner.gateway.gateway import Gateway
from learner.gateway.journal import JournalFailed
from learner.gateway.segments import JournalDamaged
from learner.process import END, complain, keep_freed_memory, log_to_stderr, read_config
from protos import faultpoints, stacks
from protos.identity import resolve_model
from protos.lifeline import die_with_parent

SWITCH_S = 0.0005  # the journal's thread waits at most so long for the interpreter's lock between write and sync; Python's own 5 ms is a sync's time
GC_THRESHOLDS = (20_000, 20, 100)  # the account holds many small objects and no cycles


async def serve(config: LearnerConfig, endings: tuple[signal.Signals, ...]) -> None:
    """Serves until one of these signals, or the end of the run."""
    stopping = asyncio.Event()
    for number in endings:
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GC_THRESHOLDS)
    await Gateway(config, resolve_model(config.model), run_id_of(config)).run(stopping)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m learner.gateway", description="Serves one run's account to actors and trainer ranks.", epilog="example: python -m learner.gateway --config runs/r1/resolved/learner.json")
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file of LearnerConfig")
    parser.add_argument("--supervised", action="store_true", help="end by SIGUSR1 only: who started it says when, for the ranks that leave at a SIGTERM need it for their cut")
    arguments = parser.parse_args()
    endings = (END,) if arguments.supervised else (signal.SIGTERM, signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGINT) if arguments.supervised else ():
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(os.getppid())
    stacks.answering()
    try:
        log_to_stderr()
        faultpoints.check()
        uvloop.run(serve(read_config(arguments.config), endings))
    except (ValueError, FileNotFoundError, JournalDamaged) as error:
        return complain(str(error))
    except JournalFailed as error:
        complain(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
