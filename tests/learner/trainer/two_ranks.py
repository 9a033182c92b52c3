"""What two real ranks do in the tests of skips, buffers and cuts. Each writes what it saw; the tests judge."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from learner.config import OptimizerConfig
from learner.trainer.checkpoint import Saver, restore
from learner.trainer.optimizer import Optimizer
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import whole

SETTINGS = OptimizerConfig(lr=1e-2, warmup_updates=4)


class LocalFeed:
    """Takes the place of the gateway on rank 0: a cut is marked by a rename."""

    def __init__(self) -> None:
        self.failures: list[tuple[int, str]] = []

    def save_cut(self, policy_step: int, cut_dir: str) -> str:
        marked = Path(cut_dir).with_suffix("")
        Path(cut_dir).rename(marked)
        return str(marked)

    def save_failed(self, policy_step: int, error: str) -> None:
        self.failures.append((policy_step, error))


def made(mesh: DeviceMesh, folder: Path) -> tuple[Any, Optimizer]:
    policy = rig.policy(folder, mesh)
    return policy, Optimizer(policy.causal_lm.named_parameters(), SETTINGS)


def give_gradients(optimizer: Optimizer, seed: int) -> None:
    """The same whole gradient at any world size, in place of a backward pass."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.parameters.values():
        full = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else full


def everything(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {**{name: whole(p) for name, p in optimizer.parameters.items()}, **{name: whole(t) for name, t in optimizer.state().items()}}


def skip_and_save(mesh: DeviceMesh, folder: Path, out: Path) -> None:
    rank = dist.get_rank()
    seen: dict[str, Any] = {}
    policy, optimizer = made(mesh, folder)
    seen["inv_freq"] = next(b for name, b in policy.named_buffers() if name.endswith("inv_freq")).tolist()
    # Two good updates, then NaN in one element of rank 1's shards only.
    seen["norms"] = []
    for seed in (1, 2):
        give_gradients(optimizer, seed)
        seen["norms"].append(optimizer.update().grad_norm)
    before = everything(optimizer)
    give_gradients(optimizer, 3)
    if rank == 1:
        gradient = next(iter(optimizer.parameters.values())).grad
        assert isinstance(gradient, DTensor)
        gradient.to_local().view(-1)[0] = float("nan")
    update = optimizer.update()
    after = everything(optimizer)
    seen["skip"] = {"skipped": update.skipped, "updates": optimizer.num_updates, "num_skipped": optimizer.num_skipped}
    seen["unchanged"] = all(torch.equal(before[name], after[name]) for name in before)
    # A save, and the weights are changed at once (faults.md 109).
    saver = Saver(folder=out, model=policy.causal_lm, optimizer=optimizer, feed=LocalFeed(), write=slow_save)  # type: ignore[arg-type]
    saver.start(policy_step=5)
    give_gradients(optimizer, 4)
    optimizer.update()
    GO.set()
    next_state = everything(optimizer)
    saver.wait()
    seen["saved"] = saver.report.num_saved
    seen["before_failures"] = digests(out / "step-000005")
    seen["failures"] = {name: failed_save(policy, optimizer, out, 6 + index, write) for index, (name, write) in enumerate(BROKEN.items())}
    seen["after_failures"] = digests(out / "step-000005")
    if rank == 0:
        torch.save({"saved_state": after, "next_state": next_state}, out / "states")
    (out / f"seen-{rank}.json").write_text(json.dumps(seen))


GO = threading.Event()


def slow_save(state: dict[str, Any], **arguments: Any) -> None:
    """Writes only once the trainer has gone on."""
    GO.wait(30)
    dcp.save(state, **arguments)


def failed_save(policy: Any, optimizer: Optimizer, out: Path, step: int, write: Any) -> dict[str, Any]:
    """One save that goes wrong on rank 1, an update, and a save of the same saver that does not."""
    feed, began_s = LocalFeed(), time.monotonic()
    first = iter([write])
    saver = Saver(folder=out / "failing", model=policy.causal_lm, optimizer=optimizer, feed=feed, write=lambda *a, **k: next(first, dcp.save)(*a, **k))  # type: ignore[arg-type]
    saver.start(policy_step=step)
    saver.wait()
    took_s, left = time.monotonic() - began_s, [path.name for path in (out / "failing").glob("*")] if dist.get_rank() == 0 else []
    give_gradients(optimizer, step)
    trains_on = not optimizer.update().skipped
    failed, told = saver.report.num_failed, list(feed.failures)
    saver.start(policy_step=100 + step)
    saver.wait()
    return {"failed": failed, "told": told, "took_s": took_s, "left": left, "trains_on": trains_on, "saved_later": saver.report.num_saved, "failed_later": saver.report.num_failed}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


class FullDisk(FileSystemWriter):
    def write_data(self, *arguments: Any, **more: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write_data(*arguments, **more)


def full_disk_on_rank_1(state: dict[str, Any], *, checkpoint_id: Path, process_group: Any) -> None:
    dcp.save(state, storage_writer=FullDisk(checkpoint_id), process_group=process_group)


def failing_before_the_first_collective(state: dict[str, Any], **arguments: Any) -> None:
    """Outside of what the checkpoint library guards: rank 0 is in its first gather and would wait for rank 1."""
    if dist.get_rank() == 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    dcp.save(state, **arguments)


def denied_on_rank_1(state: dict[str, Any], *, checkpoint_id: Path, process_group: Any) -> None:
    """Rank 1 may not write there: as another user where this one is root, who may write everywhere."""
    if dist.get_rank() == 0 or os.geteuid() != 0:
        locked = checkpoint_id.parent / "locked"
        locked.mkdir(parents=True, exist_ok=True)
        locked.chmod(0o555)
        dcp.save(state, checkpoint_id=checkpoint_id if dist.get_rank() == 0 else locked / "cut", process_group=process_group)
        return
    os.seteuid(65534)
    try:
        dcp.save(state, checkpoint_id=checkpoint_id, process_group=process_group)
    finally:
        os.seteuid(0)


BROKEN = {"full": full_disk_on_rank_1, "early": failing_before_the_first_collective, "denied": denied_on_rank_1}  # what happens to a save


def resumed(mesh: DeviceMesh, folder: Path, cut: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Optimizer]:
    """State right after a restore, and after the next update."""
    policy, optimizer = made(mesh, folder)
    assert restore(cut, policy.causal_lm, optimizer) == 5
    right_after = everything(optimizer)
    give_gradients(optimizer, 4)
    optimizer.update()
    return right_after, everything(optimizer), optimizer


def resumed_on(mesh: DeviceMesh, folder: Path, cut: Path, out: Path) -> None:
    """`resumed` on as many ranks as there are, written down by the first."""
    right_after, later, optimizer = resumed(mesh, folder, cut)
    if dist.get_rank() == 0:
        torch.save({"right_after": right_after, "later": later, "counters": (optimizer.num_updates, optimizer.num_skipped)}, out)
