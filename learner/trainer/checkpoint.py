"""Cuts: weights, optimizer, schedule, random state and counters, written in the background from a copy.

    training thread:  copy state ──▶ next step ...                        (blocked only for the copy)
    save thread:                 dcp.save over its own process group ──▶ rank 0: SaveCut marks the cut

The copy makes a cut one moment's state whatever the trainer does meanwhile. A save that fails on any rank fails on all
(the checkpoint library gathers every rank's error), is cleaned up, counted and reported; training goes on.
"""

from __future__ import annotations

import logging
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from learner.sums import write_sums
from learner.trainer.feed import Feed
from learner.trainer.optimizer import Optimizer
from protos import faultpoints

_LOG = logging.getLogger("headrace.learner.checkpoint")


def training_state(model: nn.Module, optimizer: Optimizer, policy_step: int, reference: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Everything a cut holds, as tensors that share memory with the live ones (loading writes into them).

    reference: weights of a KL reference that follows the policy; None or empty: there is none.
    """
    return {
        **({"reference": dict(reference)} if reference else {}),
        "model": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "optimizer": optimizer.state(),
        "counters": {name: torch.tensor(value) for name, value in _counters(optimizer, policy_step).items()},
        "random": {f"rank-{dist.get_rank()}": random_state()},
    }


def _counters(optimizer: Optimizer, policy_step: int) -> dict[str, int]:
    return {"policy_step": policy_step, "updates": optimizer.num_updates, "skipped": optimizer.num_skipped}


def seed_all(seed: int) -> None:
    """Every generator that random_state saves begins from the run's seed; a restore comes after it, never before."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


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


def restore(folder: Path, model: nn.Module, optimizer: Optimizer, reference: Mapping[str, Tensor] | None = None) -> int:
    """Loads a cut into model and optimizer, at any world size; its policy step. Collective.

    Ranks beyond the number that saved keep the random state they have.
    """
    state = training_state(model, optimizer, 0, reference)
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


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return value.detach().clone() if value.device.type == "cpu" else value.detach().to("cpu", copy=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """Saves since the start. Example: SaveReport(num_saved=3, num_failed=0, blocked_s=0.2, seconds=1.9, last_cut="…/step-000030")"""

    num_saved: int = 0
    num_failed: int = 0
    blocked_s: float = 0.0  # of the last save: how long the training thread was held
    seconds: float = 0.0  # of the last finished save, from start to mark
    last_cut: str = ""


class Saver:
    """Saves cuts one after another in a thread of its own. Example: `saver.start(policy_step=10)`, later `saver.wait()`."""

    def __init__(self, *, folder: Path, model: nn.Module, optimizer: Optimizer, feed: Feed, write: Callable[..., object] = dcp.save, reference: Callable[[], Mapping[str, Tensor]] = dict) -> None:
        """Collective: makes the process group that saves use, so that they never mix with training's collectives. reference: its weights now, see training_state."""
        self._folder, self._model, self._optimizer, self._feed, self._write = folder, model, optimizer, feed, write
        self._reference = reference
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self.report = SaveReport()

    def start(self, policy_step: int) -> None:
        """Copies the state and returns; a save still running is waited for first."""
        started = time.monotonic()
        self.wait()
        state = _copy(training_state(self._model, self._optimizer, policy_step, self._reference()))
        self._thread = threading.Thread(target=self._save, args=(policy_step, state, started, time.monotonic() - started), name="save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns once no save is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, policy_step: int, state: dict[str, Any], started: float, blocked_s: float) -> None:
        cut = self._folder / f"step-{policy_step:06d}.tmp"  # the gateway marks it and takes the suffix away
        before = self.report
        try:
            if dist.get_rank() == 0:
                shutil.rmtree(cut, ignore_errors=True)  # what an earlier life left unfinished
            dist.barrier(group=self._group)
            faultpoints.point("trainer_save")
            self._write(state, checkpoint_id=cut, process_group=self._group)
            self._sum(cut)
            marked = self._feed.save_cut(policy_step, str(cut)) if dist.get_rank() == 0 else ""
            self.report = SaveReport(num_saved=before.num_saved + 1, num_failed=before.num_failed, blocked_s=blocked_s, seconds=time.monotonic() - started, last_cut=marked)
        except (Exception, dcp.CheckpointException) as error:  # supervised edge; the library's own error is no Exception
            _LOG.error("save of step %d failed on this or another rank: %s: %s", policy_step, type(error).__name__, error)
            self.report = SaveReport(num_saved=before.num_saved, num_failed=before.num_failed + 1, blocked_s=blocked_s, seconds=before.seconds, last_cut=before.last_cut)
            self._clean_up(policy_step, cut, error)

    def _sum(self, cut: Path) -> None:
        """Every rank leaves the checksums of what it wrote. Collective; raises OSError on all ranks when it failed on one."""
        rank, failure = dist.get_rank(), None
        try:
            names = sorted(path.name for path in cut.glob(f"__{rank}_*"))
            write_sums(cut, [*names, ".metadata"] if rank == 0 else names, cut / f"sums-{rank}.json")
        except OSError as error:
            failure = error
        failed = torch.tensor(int(failure is not None))
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if failed:
            raise failure or OSError("checksums could not be written on another rank")

    def _clean_up(self, policy_step: int, cut: Path, error: BaseException) -> None:
        if dist.get_rank() != 0:
            return
        shutil.rmtree(cut, ignore_errors=True)
        try:
            self._feed.save_failed(policy_step, f"{type(error).__name__}: {error}")
        except Exception as second:  # supervised edge: the gateway itself may be what failed
            _LOG.error("could not report the failed save of step %d: %s", policy_step, second)
