"""Cuts: weights, optimizer, schedule, random state and counters, written in the background from a copy.

    training thread:  start ──▶ forward, backward ... ──▶ next update     (waits before it until the copy is whole)
    save thread:           copy state ─────▶ dcp.save over its own process group ──▶ rank 0: SaveCut marks the cut

Weights and moments change in an update and a reference's weights right after it, and nowhere else, and both wait for the copy. So it is
made while the next batch is already computed, and is one moment's state all the same; random state and counters are taken at once.
Copies go to the same memory from save to save. A save that fails on any rank, or does not end in time, fails on all: after each of its
three parts (copy, write, mark) the ranks agree through the store (accord.py), and a rank that failed leaves the process group, so that
nobody waits for it in a collective. It is cleaned up, counted and reported; training goes on, and the next save has a fresh group.
"""

from __future__ import annotations

import gc
import logging
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from learner.sums import write_sums
from learner.trainer.accord import Accord
from learner.trainer.adamw8 import Packed
from learner.trainer.feed import Feed
from learner.trainer.optimizer import Optimizer
from protos import faultpoints

_LOG = logging.getLogger("headrace.learner.checkpoint")
_MARK_S = 900.0  # SaveCut's own deadline, and the patience for a gateway that is being restarted
_LATE_S = 120.0  # for the verdicts beyond the parts' limits
_SAID_CHARS = 400  # of an error, told to the other ranks


def training_state(
    model: nn.Module, optimizer: Optimizer, policy_step: int, reference: Mapping[str, Tensor | Packed] | None = None, control: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Everything a cut holds, as tensors that share memory with the live ones (loading writes into them), or moments still packed.

    reference: weights of a KL reference that follows the policy; control: numbers that follow what was measured; None or empty: there are none.
    """
    return {
        **({"control": dict(control)} if control else {}),
        **({"reference": dict(reference)} if reference else {}),
        "model": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "optimizer": {**optimizer.state(), **optimizer.packed()},
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


def restore(folder: Path, model: nn.Module, optimizer: Optimizer, reference: Mapping[str, Tensor | Packed] | None = None, control: Mapping[str, Tensor] | None = None) -> int:
    """Loads a cut into model and optimizer, at any world size; its policy step. Collective.

    Ranks beyond the number that saved keep the random state they have; a control that the cut knows nothing of stays as it is.
    """
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    known = {name: value for name, value in (control or {}).items() if f"control.{name}" in saved}
    state = training_state(model, optimizer, 0, reference, known)
    own = f"random.rank-{dist.get_rank()}.torch"
    if own not in saved:
        del state["random"]
    opened = _opened(state)
    dcp.load(opened, checkpoint_id=folder)
    _pack(state, opened)
    counters = {name: int(value) for name, value in state["counters"].items()}
    optimizer.num_updates, optimizer.num_skipped = counters["updates"], counters["skipped"]
    if "random" in state:
        set_random_state(state["random"][f"rank-{dist.get_rank()}"])
    return counters["policy_step"]


def _copy(value: Any, into: Any) -> Any:
    """A copy in host memory of nested dicts of tensors; `into` (an earlier copy, or None) is used again where it fits."""
    if isinstance(value, dict):
        return {key: _copy(inner, into.get(key) if isinstance(into, dict) else None) for key, inner in value.items()}
    if isinstance(value, Packed):
        return value.unpacked(into)
    if isinstance(into, Tensor) and into.shape == value.shape and into.dtype == value.dtype:
        _local(into).copy_(_local(value.detach()))
        return into
    return value.detach().clone() if value.device.type == "cpu" else value.detach().to("cpu", copy=True)


def _opened(value: Any) -> Any:
    """The same nested dicts, packed moments as tensors to load into."""
    if isinstance(value, dict):
        return {key: _opened(inner) for key, inner in value.items()}
    return value.unpacked() if isinstance(value, Packed) else value


def _pack(value: Any, opened: Any) -> None:
    """What was loaded into `opened` goes into the packed moments."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _pack(inner, opened[key])
    elif isinstance(value, Packed):
        value.pack(opened)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """Saves since the start. Example: SaveReport(num_saved=3, num_failed=0, blocked_s=0.2, seconds=1.9, last_cut="…/step-000030", last_step=30)"""

    num_saved: int = 0
    num_failed: int = 0
    blocked_s: float = 0.0  # of the last save: how long the training thread was held, at its start and before the next update
    seconds: float = 0.0  # of the last finished save, from start to mark
    last_cut: str = ""  # on rank 0
    last_step: int = -1  # policy step of the last cut; -1: none


class _Meeting:
    """Where the ranks' save threads meet: a process group of their own, so that saves never mix with training's collectives, and an accord."""

    def __init__(self, group: dist.ProcessGroup, accord: Accord) -> None:
        self.group: dist.ProcessGroup | None = group
        self._accord = accord

    @property
    def left(self) -> bool:
        return self.group is None

    def together(self, name: str, work: Callable[[], None], limit_s: float) -> str:
        """Does this rank's part and hears how all ranks' parts went; why not all went well, "" where they did."""
        failure = _failure_of(work)
        try:
            self._accord.say(name, failure)
            if failure:
                self.leave()
            return self._accord.verdict(name, limit_s=limit_s)
        except Exception as error:  # supervised edge: the store went with rank 0
            return f"{failure or 'no verdict'}; {type(error).__name__}: {error}"

    def leave(self) -> None:
        """Closes this rank's connections: whoever waits for it in a collective of the group fails at once."""
        group, self.group = self.group, None
        if group is None:
            return
        with suppress(Exception):  # a group that broke in the middle may say so once more
            dist.destroy_process_group(group)
        del group
        gc.collect()  # gloo closes with the last reference, and what failed may hold one in a circle


def _meet(limit_s: float) -> _Meeting:
    """Collective, of the training threads."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
    store = dist.PrefixStore(f"saves/{group.group_name}", _get_default_store())
    return _Meeting(group, Accord(store, rank=dist.get_rank(), size=dist.get_world_size()))


class Saver:
    """Saves cuts one after another in a thread of its own. Example: `saver.start(policy_step=10)`, later `saver.wait()`."""

    def __init__(
        self, *, folder: Path, model: nn.Module, optimizer: Optimizer, feed: Feed, write: Callable[..., object] = dcp.save,
        reference: Callable[[], Mapping[str, Tensor | Packed]] = dict, control: Mapping[str, Tensor] | None = None, limit_s: float = 1800.0,
    ) -> None:  # fmt: skip
        """Collective. reference: its weights now; control: see training_state. limit_s: each part of a save (copy, write, mark) has failed after this."""
        self._folder, self._model, self._optimizer, self._feed, self._write = folder, model, optimizer, feed, write
        self._reference, self._control, self._limit_s = reference, control, limit_s
        self._thread: threading.Thread | None = None
        self._ends_s = 0.0  # of time.monotonic: when the running save has ended, however it went
        self._number = 0  # of the newest save
        self._meeting = _meet(limit_s)
        self._copies: dict[str, Any] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._blocked_s = 0.0
        optimizer.before_update = self.settle
        self.report = SaveReport()

    def start(self, policy_step: int) -> None:
        """Begins a save of the state as it is now; a save still running is waited for first. `settle` goes before the next change. Collective."""
        started = time.monotonic()
        stuck = not self.wait()
        if stuck:
            self._copies = None  # that save may still read them
        if stuck or self._meeting.left:
            self._meeting.leave()
            self._meeting = _meet(self._limit_s)
        self._number += 1
        self._ends_s = started + 2 * self._limit_s + max(self._limit_s, _MARK_S) + _LATE_S
        state = None if stuck else training_state(self._model, self._optimizer, policy_step, self._reference(), self._control)
        self._copied.clear()
        self._thread = threading.Thread(target=self._save, args=(self._number, self._meeting, policy_step, state, started), name="save", daemon=True)
        self._thread.start()
        self._blocked_s = time.monotonic() - started

    def settle(self) -> None:
        """Returns once weights (a reference's too) and moments may change: the copy of the save that runs is whole."""
        started = time.monotonic()
        self._copied.wait()
        self._blocked_s += time.monotonic() - started

    def wait(self) -> bool:
        """Returns once no save is running; False: one hangs in its disk, and is given up."""
        if self._thread is None:
            return True
        self._thread.join(max(0.0, self._ends_s - time.monotonic()))
        ended, self._thread = not self._thread.is_alive(), None
        return ended

    def _save(self, number: int, meeting: _Meeting, policy_step: int, live: dict[str, Any] | None, started: float) -> None:
        cut = self._folder / f"step-{policy_step:06d}.tmp"  # the gateway marks it and takes the suffix away
        before, marked = self.report, list[str]()
        error = (
            meeting.together(f"{number}/copy", lambda: self._copy(live, cut), self._limit_s)
            or meeting.together(f"{number}/write", lambda: self._write_own(cut, meeting), self._limit_s)
            or meeting.together(f"{number}/mark", lambda: marked.extend(self._mark(policy_step, cut)), max(self._limit_s, _MARK_S))
        )
        if number != self._number:
            return  # given up long ago, and counted then
        if error:
            meeting.leave()
            _LOG.error("save of step %d failed: %s", policy_step, error)
            self.report = replace(before, num_failed=before.num_failed + 1, blocked_s=self._blocked_s)
            self._clean_up(policy_step, cut, error)
        else:
            self.report = SaveReport(num_saved=before.num_saved + 1, num_failed=before.num_failed, blocked_s=self._blocked_s, seconds=time.monotonic() - started, last_cut="".join(marked), last_step=policy_step)

    def _copy(self, live: dict[str, Any] | None, cut: Path) -> None:
        try:
            if live is None:
                raise OSError(f"the save before this one still hangs in its disk, long after checkpoint.save_s={self._limit_s:.0f}")
            self._copies = _copy(live, self._copies)
        finally:
            self._copied.set()
        if dist.get_rank() == 0:
            shutil.rmtree(cut, ignore_errors=True)  # what an earlier life left unfinished

    def _write_own(self, cut: Path, meeting: _Meeting) -> None:
        """The library's save, and the checksums of what this rank wrote."""
        faultpoints.point("trainer_save")
        self._write(self._copies, checkpoint_id=cut, process_group=meeting.group)
        rank = dist.get_rank()
        names = sorted(path.name for path in cut.glob(f"__{rank}_*"))
        write_sums(cut, [*names, ".metadata"] if rank == 0 else names, cut / f"sums-{rank}.json")

    def _mark(self, policy_step: int, cut: Path) -> list[str]:
        return [self._feed.save_cut(policy_step, str(cut))] if dist.get_rank() == 0 else []

    def _clean_up(self, policy_step: int, cut: Path, error: str) -> None:
        if dist.get_rank() != 0:
            return
        shutil.rmtree(cut, ignore_errors=True)
        try:
            self._feed.save_failed(policy_step, error)
        except Exception as second:  # supervised edge: the gateway itself may be what failed
            _LOG.error("could not report the failed save of step %d: %s", policy_step, second)


def _failure_of(work: Callable[[], None]) -> str:
    """What a part of a save raised, in a line; "" for nothing. The library's own error, which holds every rank's, is no Exception."""
    try:
        work()
    except dcp.CheckpointException as error:
        return "; ".join(f"rank {rank}: {_words(inner)}" for rank, (inner, _) in sorted(error.failures.items()))
    except Exception as error:  # supervised edge
        _LOG.warning("a part of a save failed here", exc_info=True)
        return _words(error)
    return ""


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SAID_CHARS]}"
