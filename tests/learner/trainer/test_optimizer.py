"""Schedules in updates, Muon, frozen parameters (faults.md 89, 115)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from learner.config import OptimizerConfig
from learner.trainer.model import freeze_matching
from learner.trainer.optimizer import Optimizer
from learner.trainer.schedule import learning_rate
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import whole


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def rates(updates: list[int], total: int | None = None, **config: Any) -> list[float]:
    made = OptimizerConfig(lr=1.0, **config)
    return [learning_rate(made, num_updates=n, total_updates=total) for n in updates]


def test_warm_up_counts_updates() -> None:
    assert rates(list(range(6)), warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates([0]) == [1.0]


def test_decay_counts_updates_and_not_steps() -> None:
    # faults.md 115: 4 updates a step, to 0 over 100 updates, after step 10: 40 are done, lr = .6
    assert rates([0, 40, 99, 100, 500], total=100, schedule="linear") == pytest.approx([1.0, 0.6, 0.01, 0.0, 0.0])
    # 10 of 110 are warm-up; half of the rest is 50: cosine .1 + .9 * .5; its end .1
    assert rates([4, 9, 60, 110], schedule="cosine", decay_updates=110, warmup_updates=10, min_lr_share=0.1) == pytest.approx([0.5, 1.0, 0.55, 0.1])


def test_a_decay_without_an_end_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"schedule=linear needs an end.*decay_updates"):
        Optimizer([("w", nn.Parameter(torch.ones(1)))], OptimizerConfig(schedule="linear"))


@pytest.mark.parametrize(
    ("config", "says"), [({"decay_updates": 5}, "nothing decays"), ({"schedule": "linear", "decay_updates": 5, "warmup_updates": 5}, "would end before it begins"), ({"momentum": 0.9}, "only kind=muon reads it")]
)
def test_settings_without_effect_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OptimizerConfig(**config)


def test_small_updates_add_up_in_float32() -> None:
    # faults.md 89: 1,000 updates of lr 1e-6 with a constant gradient take w from 1 to .999; in bfloat16 each would round away (spacing 2^-8 below 1)
    weight = nn.Parameter(torch.ones(4))
    optimizer = Optimizer([("w", weight)], OptimizerConfig(lr=1e-6))
    for _ in range(1000):
        weight.grad = torch.ones(4)
        optimizer.update()
    assert weight.detach().tolist() == pytest.approx([0.999] * 4, abs=2e-5)


def test_muon_turns_matrices_orthogonal_and_leaves_tables_and_vectors_to_adamw() -> None:
    torch.manual_seed(0)
    named: dict[str, nn.Parameter] = {name: nn.Parameter(torch.randn(*shape)) for name, shape in (("model.embed_tokens.weight", (9, 8)), ("layers.0.mlp.weight", (8, 16)), ("norm.weight", (8,)))}
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = Optimizer(named.items(), OptimizerConfig(kind="muon", lr=0.1))
    assert {key.rpartition(".")[2] for key in optimizer.state() if key.startswith("layers")} == {"momentum_buffer"}
    assert {key.rpartition(".")[2] for key in optimizer.state() if key.startswith(("model", "norm"))} == {"step", "exp_avg", "exp_avg_sq"}
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.update()
    moved = {name: p.detach() - before[name] for name, p in named.items()}
    singular: Tensor = torch.linalg.svdvals(moved["layers.0.mlp.weight"]) / (0.1 * 0.2 * 16**0.5)  # lr * .2 sqrt(max(rows, columns)), Liu et al. 2025, equation 4
    assert bool(((singular > 0.6) & (singular < 1.3)).all())  # five Newton-Schulz steps bring them near 1
    assert moved["norm.weight"].abs().tolist() == pytest.approx([0.1] * 8, abs=1e-3)  # AdamW's first step is lr in each direction


def test_frozen_parameters_are_kept_and_take_no_state(mesh: DeviceMesh, tmp_path: Path) -> None:
    policy = rig.policy(rig.llama(tmp_path / "llama"), mesh)
    freeze_matching(policy.causal_lm, [r"embed", r"layers\.[01]\."])
    optimizer = Optimizer(policy.causal_lm.named_parameters(), OptimizerConfig(lr=1.0))
    assert {name.split(".")[2] for name in optimizer.parameters if ".layers." in name} == {"2"} and "model.embed_tokens.weight" not in optimizer.parameters
    assert not any("embed" in name for name in optimizer.state())
    kept = whole(policy.causal_lm.get_parameter("model.embed_tokens.weight"))
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.update()
    assert torch.equal(whole(policy.causal_lm.get_parameter("model.embed_tokens.weight")), kept)


@pytest.mark.parametrize(("patterns", "says"), [(["nothing_like_it"], "no parameter's name matches 'nothing_like_it'"), (["."], "leaves nothing to train")])
def test_a_pattern_that_fits_nothing_or_everything_is_refused(patterns: list[str], says: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    policy = rig.policy(rig.llama(tmp_path / "llama"), mesh)
    with pytest.raises(ValueError, match=says):
        freeze_matching(policy.causal_lm, patterns)


def test_gradients_are_clipped_to_the_norm_of_all_together() -> None:
    # gradients (3, 0) and (0, 4): norm 5; at most 1: a fifth of each; the first moment is (1 - .9) of that
    named = {name: nn.Parameter(torch.zeros(2)) for name in ("a", "b")}
    optimizer = Optimizer(named.items(), OptimizerConfig(lr=1.0, clip_norm=1.0))
    named["a"].grad, named["b"].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert optimizer.update().grad_norm == 5.0
    state = optimizer.state()
    assert state["a.exp_avg"].tolist() == pytest.approx([0.06, 0.0]) and state["b.exp_avg"].tolist() == pytest.approx([0.0, 0.08])
    named["a"].grad, named["b"].grad = torch.tensor([0.6, 0.0]), torch.tensor([0.0, 0.0])  # under it: as they are
    optimizer.update()
    assert float(optimizer.state()["a.exp_avg"][0]) == pytest.approx(0.9 * 0.06 + 0.1 * 0.6)


def test_it_is_torch_s_adamw() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5))
    other = nn.Parameter(weight.detach().clone())
    optimizer = Optimizer([("w", weight)], OptimizerConfig(lr=0.1, weight_decay=0.1, clip_norm=100.0))
    plain = torch.optim.AdamW([other], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(5):
        weight.grad = torch.randn(5)
        other.grad = weight.grad.clone()
        optimizer.update()
        plain.step()
    torch.testing.assert_close(weight, other)
