"""Skips, buffers and cuts on two real ranks (faults.md 16, 87, 109, 111, 115, 116, 117)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.trainer.checkpoint import random_state, seed_all, set_random_state
from tests.learner.trainer import rig, two_ranks

pytestmark = pytest.mark.timeout(240)  # two processes that import torch and transformers, on cores that others use too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """Everything that two ranks did, in one start of two processes."""
    made = tmp_path_factory.mktemp("two")
    rig.spawn(2, two_ranks.skip_and_save, made / "store", folder, made)
    return made


@pytest.fixture(scope="module")
def seen(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"seen-{rank}.json").read_text()) for rank in range(2)]


def test_computed_buffers_are_right_on_every_rank(seen: list[dict[str, Any]]) -> None:
    # faults.md 16: base 10000, head of 8
    for rank in seen:
        assert rank["inv_freq"] == pytest.approx([1, 0.1, 0.01, 0.001])


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_both(seen: list[dict[str, Any]]) -> None:
    # faults.md 87: two updates were made before
    for rank in seen:
        assert rank["skip"] == {"skipped": True, "updates": 2, "num_skipped": 1}
        assert rank["unchanged"]


def test_the_norm_is_that_of_the_whole_gradient_on_every_rank(seen: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    with rig.group(0, 1, tmp_path / "store") as mesh:
        _, optimizer = two_ranks.made(mesh, folder)
        expected = []
        for seed in (1, 2):
            two_ranks.give_gradients(optimizer, seed)
            expected.append(float(torch.cat([p.grad.flatten() for p in optimizer.parameters.values() if p.grad is not None]).norm()))
    for rank in seen:
        assert rank["norms"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("what", "words"), [("full", "No space left"), ("early", "rank 1: OSError: [Errno 28] No space left"), ("denied", "Permission denied")])
def test_a_failed_save_on_one_rank_is_a_failed_save_on_both_and_training_goes_on(seen: list[dict[str, Any]], what: str, words: str) -> None:
    # faults.md 111: rank 1 only; both say so long before any timeout of a collective (20 minutes), and a later save is made
    for rank, done in enumerate(rank["failures"][what] for rank in seen):
        assert done["failed"] == 1 and done["trains_on"] and done["took_s"] < 100
        assert (done["saved_later"], done["failed_later"], done["left"]) == (1, 1, [name for name in done["left"] if name == "locked" or name.startswith("step-0001")])
        assert [step for step, _ in done["told"]] == ([6 + list(two_ranks.BROKEN).index(what)] if rank == 0 else [])
        assert all(words in text for _, text in done["told"])


def test_failed_saves_leave_the_cut_before_untouched(seen: list[dict[str, Any]], out: Path) -> None:
    assert [path.name for path in sorted(out.glob("step-*"))] == ["step-000005"]
    assert seen[0]["before_failures"] == seen[0]["after_failures"] == two_ranks.digests(out / "step-000005") and len(seen[0]["before_failures"]) >= 5


def test_a_cut_holds_the_state_of_its_moment_and_restores_at_another_world_size(seen: list[dict[str, Any]], out: Path, folder: Path, tmp_path: Path) -> None:
    # faults.md 109, 115, 116: saved by two ranks while the next update ran, restored by one; its next update equals theirs.
    states = torch.load(out / "states")
    with rig.group(0, 1, tmp_path / "store") as mesh:
        right_after, later, optimizer = two_ranks.resumed(mesh, folder, out / "step-000005")
    assert [rank["saved"] for rank in seen] == [1, 1]
    for name, tensor in states["saved_state"].items():
        assert torch.equal(right_after[name], tensor), name
    for name, tensor in states["next_state"].items():
        torch.testing.assert_close(later[name], tensor, atol=1e-6, rtol=1e-6, msg=name)
    assert (optimizer.num_updates, optimizer.num_skipped) == (3, 1)


@pytest.mark.slow
def test_a_cut_of_two_ranks_goes_on_at_four(out: Path, folder: Path, tmp_path: Path) -> None:
    # faults.md 116: moments and step equal, the next update that of two ranks to 1e-6
    states = torch.load(out / "states")
    rig.spawn(4, two_ranks.resumed_on, tmp_path / "store", folder, out / "step-000005", tmp_path / "found")
    found = torch.load(tmp_path / "found")
    assert all(torch.equal(found["right_after"][name], tensor) for name, tensor in states["saved_state"].items())
    for name, tensor in states["next_state"].items():
        torch.testing.assert_close(found["later"][name], tensor, atol=1e-6, rtol=1e-6, msg=name)
    assert found["counters"] == (3, 1)


def test_random_state_goes_on_where_it_was() -> None:
    # faults.md 117
    def draw() -> list[float]:
        return [*torch.rand(2).tolist(), random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]

    seed_all(5)
    beginning = draw()
    seed_all(5)
    assert draw() == beginning
    state = random_state()
    first, second = draw(), draw()
    set_random_state(state)
    assert draw() == first and first != second
