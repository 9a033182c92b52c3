"""One batch cut in ten ways gives one gradient, of the actor and of the critic (faults.md 82, 83, 88, 92)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.learner.trainer import cuts, rig
from tests.learner.trainer.cuts import CUTS, PRECISIONS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"gpt2": rig.gpt2(root / "gpt2"), "llama": rig.llama(root / "llama")}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, name: str) -> None:
    """Within tolerance of the role's largest gradient; prints how far each role is (`pytest -s`)."""
    assert found.keys() == expected.keys()
    apart = dict.fromkeys(("actor", "critic"), 0.0)
    for role in ("actor", "critic"):
        scale = max(float(g.abs().max()) for key, g in expected.items() if key.startswith(role))
        assert scale > 1e-3, role
        for key, gradient in expected.items():
            if key.startswith(role):
                apart[role] = max(apart[role], float((found[key] - gradient).abs().max()) / scale)
                assert apart[role] <= tolerance, f"{name}: {key}"
    print(f"{name}: actor {apart['actor']:.1e}, critic {apart['critic']:.1e} of {tolerance:.0e}")
    for key in expected.keys() - {k for k in expected if k.startswith(("actor", "critic"))}:
        assert float(found[key]) == pytest.approx(float(expected[key]), rel=max(tolerance, 1e-7), abs=1e-7), f"{name}: {key}"


def test_cuts_on_one_rank_give_one_gradient_of_actor_and_critic(folders: dict[str, Path], mesh: DeviceMesh) -> None:
    expected = cuts.gradients(mesh, folders["gpt2"], torch.float64, CUTS["one row"])
    for name in ("not packed", "small rows, backwards"):
        assert_same(cuts.gradients(mesh, folders["gpt2"], torch.float64, CUTS[name]), expected, 1e-10, name)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_muon_on_shards_is_muon_on_whole_matrices_and_frozen_layers_stay(folders: dict[str, Path], mesh: DeviceMesh, tmp_path: Path) -> None:
    expected = cuts.muon_update(mesh, folders["llama"])
    before = {name: p.detach() for name, p in rig.policy(folders["llama"], mesh).causal_lm.named_parameters()}
    rig.spawn(2, cuts.muon_on_ranks, tmp_path / "store", folders["llama"], tmp_path / "out")
    found = torch.load(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-3, rtol=0)  # Newton-Schulz runs in bfloat16; entries move by 5e-3 an update
    assert all(torch.equal(found[name], value) == ("layers.0." in name) for name, value in before.items())
    assert not any("layers.0." in name for name in found if name.startswith("state"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_cuts_give_one_gradient_of_actor_and_critic(folders: dict[str, Path], mesh: DeviceMesh, tmp_path: Path) -> None:
    expected = {model: cuts.gradients(mesh, folders[model], dtype, CUTS["one row"]) for model, (dtype, _) in PRECISIONS.items()}
    found: dict[str, dict[str, Tensor]] = {}
    for ranks in sorted({cut.ranks for cut in CUTS.values()}):
        rig.spawn(ranks, cuts.on_ranks, tmp_path / f"store-{ranks}", folders, tmp_path / f"out-{ranks}")
        found |= torch.load(tmp_path / f"out-{ranks}")
    assert len(found) == 2 * len(CUTS) == 20
    for name, gradients in found.items():
        model = name.partition(":")[0]
        assert_same(gradients, expected[model], PRECISIONS[model][1], name)
