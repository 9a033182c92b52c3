"""Cuts: weights, optimizer, schedule, random state and counters, written in the background from a copy.

    training thread:  start ──▶ forward, backward ... ──▶ next update     (waits before it until the copy is whole)
    save thread:           copy state ─────▶ dcp.save over its own process group ──▶ rank 0: SaveCut marks the cut

Weights and moments change in an update and nowhere else, so the copy is made while the next batch is already computed, and is one
moment's state all the same; random state and counters are taken at once. Copies go to the same memory from save to save. A save that fails on any rank fails on all
(the checkpoint library gathers every rank's error), is cleaned up, counted and reported; training goes on.
"""

from __future__ import annotations

import logging
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.trainer.feed import Feed
from learner.trainer.optimizer import Optimizer
from protos import faultpoints

_LOG = logging.getLogger("headrace.learner.checkpoint")


def training_state(model: nn.Module, optimizer: Optimizer, policy_step: int) -> dict[str, Any]:
    """Everything a cut holds, as tensors that share memory with the live ones (loading writes into them)."""
    return {
        "model": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "optimizer": optimizer.state(),
        "counters": {name: torch.tensor(value) for name, value in _counters(optimizer, policy_step).items()},
        "random": {f"rank-{dist.get_rank()}": random_state()},
    }


def _counters(optimizer: Optimizer, policy_step: int) -> dict[str, int]:
    return {"policy_step": policy_step, "updates": optimizer.num_updates, "skipped": optimizer.num_skipped}


def random_state() -> dict[str, Tensor]:
    """State of every generator of this process as integer tensors."""
    version, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words]),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([position, has_gauss, *np.asarray(key, dtype=np.int64).tolist()]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """The reverse of random_state."""
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    gauss = float(state["python_gauss"])
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    position, has_gauss, *key = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.asarray(key, dtype=np.uint32), position, has_gauss, float(state["numpy_gauss"])))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def restore(folder: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Loads a cut into model and optimizer, at any world size; its policy step. Collective.

    Ranks beyond the number that saved keep the random state they have.
    """
    state = training_state(model, optimizer, 0)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    own = f"random.rank-{dist.get_rank()}.torch"
    if own not in saved:
        del state["random"]
    dcp.load(state, checkpoint_id=folder)
    counters = {name: int(value) for name, value in state["counters"].items()}
    optimizer.num_updates, optimizer.num_skipped = counters["updates"], counters["skipped"]
    if "random" in state:
        set_random_state(state["random"][f"rank-{dist.get_rank()}"])
    return counters["policy_step"]


def _copy(value: Any, into: Any) -> Any:
    """A copy in host memory of nested dicts of tensors; `into` (an earlier copy, or None) is used again where it fits."""
    if isinstance(value, dict):
        return {key: _copy(inner, into.get(key) if isinstance(into, dict) else None) for key, inner in value.items()}
    if isinstance(into, Tensor) and into.shape == value.shape and into.dtype == value.dtype:
        _local(into).copy_(_local(value.detach()))
        return into
    return value.detach().clone() if value.device.type == "cpu" else value.detach().to("cpu", copy=True)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """Saves since the start. Example: SaveReport(num_saved=3, num_failed=0, blocked_s=0.2, seconds=1.9, last_cut="…/step-000030")"""

    num_saved: int = 0
    num_failed: int = 0
    blocked_s: float = 0.0  # of the last save: how long the training thread was held, at its start and before the next update
    seconds: float = 0.0  # of the last finished save, from start to mark
    last_cut: str = ""


class Saver:
    """Saves cuts one after another in a thread of its own. Example: `saver.start(policy_step=10)`, later `saver.wait()`."""

    def __init__(self, *, folder: Path, model: nn.Module, optimizer: Optimizer, feed: Feed, write: Callable[..., object] = dcp.save) -> None:
        """Collective: makes the process group that saves use, so that they never mix with training's collectives."""
        self._folder, self._model, self._optimizer, self._feed, self._write = folder, model, optimizer, feed, write
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._copies: dict[str, Any] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._blocked_s = 0.0
        optimizer.before_update = self.settle
        self.report = SaveReport()

    def start(self, policy_step: int) -> None:
        """Begins a save of the state as it is now; a save still running is waited for first. `settle` goes before the next change."""
        started = time.monotonic()
        self.wait()
        state = training_state(self._model, self._optimizer, policy_step)
        self._copied.clear()
        self._thread = threading.Thread(target=self._save, args=(policy_step, state, started), name="save", daemon=True)
        self._thread.start()
        self._blocked_s = time.monotonic() - started

    def settle(self) -> None:
        """Returns once weights and moments may change: the copy of the save that runs is whole."""
        started = time.monotonic()
        self._copied.wait()
        self._blocked_s += time.monotonic() - started

    def wait(self) -> None:
        """Returns once no save is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, policy_step: int, live: dict[str, Any], started: float) -> None:
        cut = self._folder / f"step-{policy_step:06d}.tmp"  # the gateway marks it and takes the suffix away
        before = self.report
        try:
            try:
                self._copies = state = _copy(live, self._copies)
            finally:
                self._copied.set()
            if dist.get_rank() == 0:
                shutil.rmtree(cut, ignore_errors=True)  # what an earlier life left unfinished
            dist.barrier(group=self._group)
            faultpoints.point("trainer_save")
            self._write(state, checkpoint_id=cut, process_group=self._group)
            marked = self._feed.save_cut(policy_step, str(cut)) if dist.get_rank() == 0 else ""
            self.report = SaveReport(num_saved=before.num_saved + 1, num_failed=before.num_failed, blocked_s=self._blocked_s, seconds=time.monotonic() - started, last_cut=marked)
        except (Exception, dcp.CheckpointException) as error:  # supervised edge; the library's own error is no Exception
            _LOG.error("save of step %d failed on this or another rank: %s: %s", policy_step, type(error).__name__, error)
            self.report = SaveReport(num_saved=before.num_saved, num_failed=before.num_failed + 1, blocked_s=self._blocked_s, seconds=before.seconds, last_cut=before.last_cut)
            self._clean_up(policy_step, cut, error)

    def _clean_up(self, policy_step: int, cut: Path, error: BaseException) -> None:
        if dist.get_rank() != 0:
            return
        shutil.rmtree(cut, ignore_errors=True)
        try:
            self._feed.save_failed(policy_step, f"{type(error).__name__}: {error}")
        except Exception as second:  # supervised edge: the gateway itself may be what failed
            _LOG.error("could not report the failed save of step %d: %s", policy_step, second)
