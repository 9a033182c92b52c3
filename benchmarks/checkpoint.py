"""How long a save holds the training thread: `python -m benchmarks.checkpoint --json`.

One rank with an optimizer's whole state (weights and both AdamW moments in float32). A save of ours is begun, the next batch is computed
(forward and backward), and the optimizer updates: held is the time in `start` and before the update until the copy is whole. The peer is
`torch.distributed.checkpoint.save` of the same state in the training thread, on the same disk, with its default settings (fsync on).
The last cut is restored into another model and compared bit for bit, moments and random state included.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from benchmarks import _line
from benchmarks._line import Bar, Pair
from learner.config import OptimizerConfig
from learner.trainer import checkpoint
from learner.trainer.checkpoint import Saver
from learner.trainer.feed import Feed
from learner.trainer.optimizer import Optimizer

WIDTH, LAYERS, BATCH = 512, 12, 512  # 12.6 million parameters: 151 MB of state; a batch computes for some tenths of a second


class Marker:
    """Stands where the gateway does: a save that is whole is a cut."""

    def __init__(self) -> None:
        self.cut = Path()

    def save_cut(self, policy_step: int, cut_dir: str) -> str:
        self.cut = Path(cut_dir)
        return cut_dir

    def save_failed(self, policy_step: int, error: str) -> None:
        raise RuntimeError(f"the save of step {policy_step} failed: {error}")


def made(seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)]
    model = nn.Sequential(*layers)
    return model, Optimizer(model.named_parameters(), OptimizerConfig(lr=1e-4))


def compute(model: nn.Module) -> None:
    model(torch.randn(BATCH, WIDTH)).square().mean().backward()


class Bench:
    """One trainer whose state grows older from pair to pair."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model, self.optimizer = made(1)
        self.marker = Marker()
        self.saver = Saver(folder=folder, model=self.model, optimizer=self.optimizer, feed=cast(Feed, self.marker))
        self.step = 0
        self.saved: dict[str, Any] = {}

    def ours(self) -> tuple[float, float, float]:
        """(seconds held, seconds of the save in all, seconds of the step beside it)."""
        self.step += 1
        self.saved = _clone(checkpoint.training_state(self.model, self.optimizer, self.step))
        self.saver.start(self.step)
        began_s = time.perf_counter()
        self._train()
        step_s = time.perf_counter() - began_s
        self.saver.wait()
        report = self.saver.report
        if report.num_failed:
            raise RuntimeError("a save failed; its error is on stderr")
        return report.blocked_s, report.seconds, step_s

    def plain(self) -> float:
        """Seconds of dcp.save."""
        state = checkpoint.training_state(self.model, self.optimizer, self.step)
        folder = self._folder / "plain"
        began_s = time.perf_counter()
        dcp.save(state, checkpoint_id=folder)
        took_s = time.perf_counter() - began_s
        shutil.rmtree(folder)
        return took_s

    def step_alone(self) -> float:
        began_s = time.perf_counter()
        self._train()
        return time.perf_counter() - began_s

    def _train(self) -> None:
        compute(self.model)
        self.optimizer.update()

    def pair(self, turn: int) -> Pair:
        step_s = self.step_alone()
        if turn % 2:
            plain_s, (held_s, save_s, beside_s) = self.plain(), self.ours()
        else:
            (held_s, save_s, beside_s), plain_s = self.ours(), self.plain()
        old = self.marker.cut
        if turn + 1 < self.num_pairs:
            shutil.rmtree(old)
        return {"held_s": held_s, "dcp_save_s": plain_s, "save_s": save_s, "step_s": step_s, "step_beside_save_s": beside_s}

    def held_at_worst_s(self) -> float:
        """Seconds held when the update follows the start at once, with nothing to compute in between."""
        self.step += 1
        self.saver.start(self.step)
        self.saver.settle()
        self.saver.wait()
        return self.saver.report.blocked_s

    num_pairs = 0

    def restored(self) -> bool:
        """Whether the last cut makes another trainer equal bit for bit to this one as it was when that save began."""
        model, optimizer = made(2)
        random.seed(9)
        np.random.seed(9)
        step = checkpoint.restore(self.marker.cut, model, optimizer)
        now = checkpoint.training_state(model, optimizer, step)
        return step == self.step and _same(now, self.saved)


def _clone(value: Any) -> Any:
    return {key: _clone(inner) for key, inner in value.items()} if isinstance(value, dict) else value.detach().clone()


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    assert isinstance(left, Tensor) and isinstance(right, Tensor)
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(_bits(left), _bits(right))


def _bits(value: Tensor) -> Tensor:
    """Bytes of a tensor: NaN equals NaN, and 0.0 is not -0.0."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk that saves go to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-checkpoint-", dir=options.disk) as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/rendezvous", rank=0, world_size=1)
        bench = Bench(Path(name))
        bench.num_pairs = max(options.pairs, _line.MIN_PAIRS)
        bench.step_alone()
        bench.ours()  # the first save also makes the memory that later copies go to
        pairs = [bench.pair(turn) for turn in range(bench.num_pairs)]
        same = bench.restored()
        worst_s = bench.held_at_worst_s()
        dist.destroy_process_group()
    state_bytes = 3 * 4 * sum(parameter.numel() for parameter in bench.model.parameters())
    bars = [
        Bar(name="blocked_vs_dcp_save", value=_line.ratio(pairs, "held_s", "dcp_save_s"), op="<=", bar=0.10),
        Bar(name="restore_bit_exact", value=float(same), op="==", bar=1),
    ]
    notes = {"state_bytes": state_bytes, "held_at_worst_s": round(worst_s, 4), "step_inflation": round(_line.ratio(pairs, "step_beside_save_s", "step_s"), 3)}
    _line.report("checkpoint", bars=bars, pairs=pairs, packages=("torch",), quiet=options.json, notes=notes)


if __name__ == "__main__":
    main()
