"""What a learner says on its terminal while it runs: where it serves, and each step as it is written."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

from learner.config import LearnerConfig
from protos.appended import whole_lines

_LOG = logging.getLogger("headrace.learner")
_LOOK_S = 0.5


async def tell(config: LearnerConfig) -> None:
    """Until cancelled: a line once the gateway answers, then one for each step that is added to metrics.jsonl."""
    file, began_s = config.run_dir / "metrics.jsonl", time.time()
    offset = file.stat().st_size if file.exists() else 0
    address = await _address(config.run_dir / "gateway.address", began_s)
    _LOG.info("serves on %s; logs in %s; `headrace status %s --watch` shows it", address, config.run_dir / "logs", config.run_dir)
    while True:
        for line, end in whole_lines(file, offset):
            offset = end
            if said := words(line, config.steps):
                _LOG.info("%s", said)
        await asyncio.sleep(_LOOK_S)


def words(line: bytes, num_steps: int) -> str:
    """Of a line of metrics.jsonl; empty for one of an evaluation. Example: "step 3 of 20: reward 0.250, version 4, 12.3 s"."""
    values = json.loads(line)
    if "evaluation" in values:
        return ""
    reward = values.get("reward_mean")
    return f"step {values['step']} of {num_steps}: reward {'none' if reward is None else format(reward, '.3f')}, version {values['version']}, {values['seconds']['total']:.1f} s"


async def _address(file: Path, since_s: float) -> str:
    """What this life's gateway wrote: an earlier one's file may still be there."""
    while not file.exists() or file.stat().st_mtime < since_s - 1.0 or not file.read_text().strip():
        await asyncio.sleep(_LOOK_S)
    return file.read_text().strip()
