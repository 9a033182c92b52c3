"""The GPUs of this machine that a launcher may give away, and the names by which its services see them.

Numbers in a run file count what this process sees: under CUDA_VISIBLE_DEVICES=4,5 (or UUIDs) number 1 is the GPU 5, and there is no number 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.schema import RunFile

_DEVICES, _WSL = Path("/dev"), "dxg"


def names_of(gpus: Sequence[int]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES of a service must say."""
    seen = _shown()
    return [seen[gpu] if seen is not None and gpu < len(seen) else str(gpu) for gpu in gpus]


def check_gpus(run: RunFile) -> None:
    """Raises ValueError for a run file that wants a GPU which is not here: no service would ever come up with it."""
    count, where = _num_here()
    if count is None:
        return
    for name, gpus in _wanted(run):
        if lacking := sorted({gpu for gpu in gpus if gpu >= count}):
            numbers = f"number 0 to {count - 1}" if count else "none"
            raise ValueError(f"{name} wants {len(set(gpus))} GPUs, among them number {', '.join(map(str, lacking))}; {count} are here ({where}): {numbers}; take fewer, or show more")


def _wanted(run: RunFile) -> Iterator[tuple[str, list[int]]]:
    place = run.placement
    yield "placement.learner_gpus", list(place.learner_gpus)
    yield "placement.rollout_gpus", [gpu for replica in place.rollout_gpus for gpu in replica]
    yield "placement.reward_gpus", [gpu for server in place.reward_gpus for gpu in server]


def _shown() -> list[str] | None:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


def _num_here() -> tuple[int | None, str]:
    """How many, and how that is known; None where nothing tells (WSL)."""
    if (seen := _shown()) is not None:
        return len(seen), f"CUDA_VISIBLE_DEVICES={','.join(seen)}"
    if (_DEVICES / _WSL).exists():
        return None, ""
    return len(list(_DEVICES.glob("nvidia[0-9]*"))), "/dev/nvidia*"
