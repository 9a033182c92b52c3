"""AdamW with moments of a byte each: the same updates within the codes' error, a quarter of the memory, cuts that fit any optimizer and world size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learner.config import LearnerConfig, OptimizerConfig
from learner.trainer.checkpoint import _copy, _opened, _pack
from learner.trainer.optimizer import Optimizer
from tests.learner.trainer import eight_bit, rig

SETTINGS = OptimizerConfig(kind="adamw_8bit", lr=1e-2, weight_decay=0.1)


def made(config: OptimizerConfig = SETTINGS) -> tuple[nn.Parameter, Optimizer]:
    """64 x 128 elements: above the 4,096 from which moments are packed."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 128))
    return weight, Optimizer([("w", weight)], config)


def stepped(weight: nn.Parameter, optimizer: Optimizer, seeds: range) -> Tensor:
    drift = torch.where(torch.arange(64) // 2 % 2 == 0, 0.5, -0.5)[:, None]  # two rows are a block: every other one has its largest moment below 0
    for seed in seeds:
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) + drift
        optimizer.update()
    return weight.detach().clone()


def test_updates_are_adamw_s_within_the_codes_error_and_moments_take_a_byte() -> None:
    weight, optimizer = made()
    plain, exact = made(OptimizerConfig(lr=1e-2, weight_decay=0.1))
    # The first update is made of moments that were never in codes: (1 - b) g, exactly.
    torch.testing.assert_close(stepped(weight, optimizer, range(1)), stepped(plain, exact, range(1)))
    start = plain.detach().clone()
    ours, theirs = stepped(weight, optimizer, range(1, 30)) - start, stepped(plain, exact, range(1, 30)) - start
    assert 0 < float((ours - theirs).norm() / theirs.norm()) < 0.03
    packed = optimizer.packed()
    assert set(packed) == {"w.exp_avg", "w.exp_avg_sq"} and set(optimizer.state()) == {"w.step"}
    held: Any = packed["w.exp_avg"].moment
    assert held.codes.dtype == torch.uint8 and held.codes.numel() == 64 * 128 and held.scale.numel() == 64 * 128 // 256


def test_a_gradient_that_is_not_finite_leaves_codes_and_steps_alone_and_clipping_divides() -> None:
    weight, optimizer = made(OptimizerConfig(kind="adamw_8bit", lr=1e-2, clip_norm=1.0))
    weight.grad = torch.full_like(weight, 3.0)  # norm 3 sqrt(8192): after clipping each element is 1 / sqrt(8192), its moment a tenth of that
    optimizer.update()
    first = _copy(optimizer.packed(), None)
    torch.testing.assert_close(first["w.exp_avg"], torch.full((64, 128), 0.1 / 8192**0.5))
    weight.grad = torch.full_like(weight, float("nan"))
    assert optimizer.update().skipped and (optimizer.num_updates, optimizer.num_skipped) == (1, 1)
    again = _copy(optimizer.packed(), None)
    assert all(torch.equal(first[key], again[key]) for key in first) and float(optimizer.state()["w.step"]) == 1.0


def test_a_cut_gives_the_codes_back_and_fits_plain_adamw() -> None:
    weight, optimizer = made()
    stepped(weight, optimizer, range(3))
    cut = _copy({"w": {**optimizer.state(), **optimizer.packed()}}, None)["w"]
    assert cut["w.exp_avg"].dtype == torch.float32 and not hasattr(cut["w.exp_avg"], "codes")
    other, restored = made()
    other.data.copy_(weight.data)
    live = {**restored.state(), **restored.packed()}
    opened = _opened(live)
    for key, value in opened.items():
        value.copy_(cut[key])
    _pack(live, opened)
    assert torch.equal(stepped(other, restored, range(3, 6)), stepped(weight, optimizer, range(3, 6)))
    plain = made(OptimizerConfig())[1].state()
    assert plain.keys() == cut.keys() and all(plain[key].shape == cut[key].shape for key in plain)


def test_small_parameters_keep_float32_moments() -> None:
    weight = nn.Parameter(torch.ones(5))
    optimizer = Optimizer([("w", weight)], SETTINGS)
    assert not optimizer.packed() and set(optimizer.state()) == {"w.step", "w.exp_avg", "w.exp_avg_sq"}


def test_a_missing_package_and_offload_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {"run_dir": tmp_path, "model": "m", "data": {"prompts": "p.jsonl"}, "trainer": {"offload": True}}
    for sections in ({"optimizer": {"kind": "adamw_8bit"}}, {"algorithm": {"name": "ppo"}, "critic": {"optimizer": {"kind": "adamw_8bit"}}}):
        with pytest.raises(ValueError, match=r"optimizer\.kind=adamw_8bit with trainer.offload=true: .*use kind=adamw"):
            LearnerConfig.model_validate({**given, **sections})
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match=r'needs the package torchao: pip install "\.\[adamw-8bit\]"'):
        made()




@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sharded_codes_come_back_at_any_number_of_ranks(tmp_path: Path) -> None:
    # faults.md 116: saved at 2 ranks; there bit for bit, at 1 and 4 within a code of each block's largest moment
    folder = eight_bit.model(tmp_path / "model")
    rig.spawn(2, eight_bit.save, tmp_path / "store-2", folder, tmp_path)
    saved = torch.load(tmp_path / "saved")
    assert all(saved["sharded"].values()) and len(saved["sharded"]) >= 14
    assert all(torch.equal(saved["after"][name], saved["again"][name]) for name in saved["after"])
    for ranks in (1, 4):
        rig.spawn(ranks, eight_bit.resume, tmp_path / f"store-{ranks}", folder, tmp_path)
        found = torch.load(tmp_path / f"resumed-{ranks}")
        assert found["moments"].keys() == saved["moments"].keys()
        for name, moment in saved["moments"].items():
            assert float((found["moments"][name] - moment).abs().max()) <= 0.01 * float(moment.abs().max()), name
        for name, weight in saved["after"].items():
            torch.testing.assert_close(found["weights"][name], weight, atol=1e-3, rtol=0, msg=name)  # an update moves by up to 1e-2
