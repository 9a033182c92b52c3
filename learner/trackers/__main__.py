"""One tracker: `python -m learner.trackers --config RESOLVED.json --tracker NAME`, started by the learner; follows metrics.jsonl until it is told to end.

Whatever its library does (raises, hangs, takes the process along) costs this process: the run goes on without the tracker, one line in its log
and the learner's says so, and run_dir/trackers/NAME.json keeps why. The next start of the learner tries it again, from where it stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from learner.config import LearnerConfig
from learner.process import complain, log_to_stderr, read_config
from learner.trackers.following import Following, Limit, Place
from learner.trackers.tracker import Tracker, settings_of
from protos import stacks
from protos.lifeline import die_with_parent

DROPPED = 3  # exit code
PAUSE_S = 1.0  # between two looks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m learner.trackers")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tracker", required=True)
    arguments = parser.parse_args()
    die_with_parent(os.getppid())
    log_to_stderr()
    stacks.answering()
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    config = read_config(arguments.config)
    file = config.run_dir / "trackers" / f"{arguments.tracker}.json"
    try:
        follow(config, arguments.tracker, file, told)
    except Exception as error:  # supervised edge: somebody else's library, on whatever line
        drop(arguments.tracker, file, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    return 0


def follow(config: LearnerConfig, name: str, file: Path, told: threading.Event) -> None:
    """Until it is told to end, and then to the last line that is there."""
    limit = Limit(config.trackers.limit_s, lambda what: drop(name, file, f"it took longer than trackers.limit_s={config.trackers.limit_s:g} for {what}"))
    before = replace(Place.read(file), dropped="")
    with limit.of("its beginning"):
        tracker, reference = make(config, name, before.reference)
    replace(before, reference=reference).write(file)
    following = Following(config.run_dir / "metrics.jsonl", file, tracker, limit)
    ending = False
    while not ending:
        ending = told.wait(PAUSE_S)
        following.catch_up()
    with limit.of("its end"):
        tracker.close()


def make(config: LearnerConfig, name: str, reference: str) -> tuple[Tracker, str]:
    """The tracker, and its library's name of the run. Imports that library and no other."""
    trackers, run_dir = config.trackers, config.run_dir
    settings = settings_of(json.loads(config.model_dump_json()))
    if trackers.tensorboard is not None and name == "tensorboard":
        from learner.trackers.to_tensorboard import ToTensorboard

        return ToTensorboard(Path(trackers.tensorboard.folder or run_dir / "tensorboard")), ""
    if trackers.wandb is not None and name == "wandb":
        from learner.trackers.to_wandb import ToWandb

        return ToWandb(trackers.wandb, run_dir=run_dir, run_id=config.run_id, settings=settings), config.run_id
    assert trackers.mlflow is not None and name == "mlflow", name
    from learner.trackers.to_mlflow import ToMlflow

    made = ToMlflow(trackers.mlflow, uri=trackers.mlflow.uri or f"sqlite:///{run_dir / 'mlflow.db'}", name=run_dir.name, reference=reference, settings=settings)
    return made, made.reference


def drop(name: str, file: Path, why: str) -> None:
    """Keeps why, says it in one line, and ends the process whatever hangs in it."""
    complain(f"the tracker {name} is dropped, the run goes on without it: {why}")
    try:
        replace(Place.read(file), dropped=why).write(file)
    except OSError as error:
        complain(f"{file}: {error}")
    logging.shutdown()
    os._exit(DROPPED)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads of a library must not keep it alive
