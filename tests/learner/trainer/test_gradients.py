"""The gradient of a batch does not depend on how it was cut (faults.md 48, 49, 51, 82, 83, 88, 92)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from learner.algorithm_config import AlgorithmConfig
from learner.algorithms.mismatch import mismatch_summary
from learner.config import OptimizerConfig
from learner.trainer.objective import make_objective
from learner.trainer.packing import WeightedSample, pack
from learner.trainer.update import train_step
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import BATCH_WIDE, Keeping, gradients, on_two_ranks

EXACT = {"gpt2": (torch.float64, 1e-10), "llama": (torch.float32, 1e-5)}  # relative to the largest gradient


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"gpt2": rig.gpt2(root / "gpt2"), "llama": rig.llama(root / "llama"), "untied": rig.llama(root / "untied", tied=False)}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys() and left
    scale = max(float(g.abs().max()) for g in right.values())
    for name, gradient in left.items():
        assert float((gradient - right[name]).abs().max()) <= tolerance * scale, name


def by_hand(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same loss written out sample by sample on transformers' own model, without packing or sharding."""
    made = rig.samples(3, 4)
    minibatch = make_objective(AlgorithmConfig(), max_new_tokens=8).minibatches(rig.entries(made), num=1)[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    total = torch.zeros((), dtype=dtype)
    for sample in made:
        ids = torch.cat([sample.prompt_ids, sample.completion_ids])
        logits = model(ids[None]).logits[0, sample.prompt_ids.numel() - 1 : -1] / rig.TEMPERATURE
        logprob = torch.log_softmax(logits, -1).gather(1, sample.completion_ids[:, None])[:, 0]
        advantage = torch.tensor(minibatch.advantages[sample.group_id, sample.sample_index], dtype=torch.float32)
        ratio = (logprob - sample.behaviour).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        total = total + torch.where(advantage < 0, loss.clamp(max=3 * abs(float(advantage))), loss)[sample.loss_mask].sum()
    (total / sum(s.num_trained_tokens for s in made)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packed_gradient_equals_the_loss_written_out_sample_by_sample(name: str, folders: dict[str, Path], mesh: DeviceMesh) -> None:
    dtype, tolerance = EXACT[name]
    packed, _ = gradients(mesh, folders[name], dtype)
    assert_same(packed, by_hand(folders[name], dtype), tolerance)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_gradient_does_not_depend_on_row_budget_or_prefix_sharing(aggregation: str, folders: dict[str, Path], mesh: DeviceMesh) -> None:
    one_row, first = gradients(mesh, folders["gpt2"], torch.float64, row_tokens=10_000, aggregation=aggregation)
    for row_tokens, share in ((1, True), (1, False), (17, True), (40, False)):
        other, second = gradients(mesh, folders["gpt2"], torch.float64, row_tokens=row_tokens, share_prefix=share, aggregation=aggregation)
        assert_same(other, one_row, 1e-10)
        assert second.loss == pytest.approx(first.loss, rel=1e-10)


@pytest.mark.timeout(240)
def test_two_ranks_give_the_gradient_of_one_however_samples_are_dealt(folders: dict[str, Path], mesh: DeviceMesh, tmp_path: Path) -> None:
    rig.spawn(2, on_two_ranks, tmp_path / "store", folders, tmp_path / "out")
    results = torch.load(tmp_path / "out")
    for name, (dtype, tolerance) in EXACT.items():
        one, result = gradients(mesh, folders[name], dtype)
        for owner in ("groups", "samples", "lopsided"):
            assert_same(results[f"{name} {owner}"], one, tolerance)
            numbers = results[f"{name} {owner} loss"]
            assert float(numbers["loss"]) == pytest.approx(result.loss, rel=1e-6)
            torch.testing.assert_close(numbers["log_ratio"], result.log_ratio.sort().values, atol=1e-5, rtol=0)
    plain, _ = gradients(mesh, folders["gpt2"], torch.float64)
    for name, algorithm in BATCH_WIDE.items():
        one, result = gradients(mesh, folders["gpt2"], torch.float64, algorithm=algorithm)
        assert_same(results[name], one, 1e-9)
        assert float(results[f"{name} loss"]["loss"]) == pytest.approx(result.loss, rel=1e-9)
        assert any(not torch.equal(one[key], plain[key]) for key in one), name  # the choice does choose something


@pytest.mark.parametrize("name", ["gpt2", "llama", "untied"])
@pytest.mark.parametrize("share", [True, False])
def test_packed_logprobs_equal_transformers_unpacked_forward_at_the_sampling_temperature(name: str, share: bool, folders: dict[str, Path], mesh: DeviceMesh) -> None:
    made = rig.samples(3, 4)
    policy = rig.policy(folders[name], mesh)
    # Behaviour log-probs of the samples are distinct random numbers, so they name the token.
    reference = {float(b): float(lp) for s in made for b, lp in zip(s.behaviour, rig.reference_logprobs(folders[name], s), strict=True)}
    rows = pack([WeightedSample(sample=s, advantage=1.0) for s in made], row_tokens=40, share_prefix=share)
    with torch.no_grad():
        found = torch.cat([policy(row) for row in rows])
        again = torch.cat([policy(row) for row in rows])
    expected = torch.tensor([reference[float(b)] for row in rows for b in row.behaviour])
    assert len(expected) == sum(s.num_trained_tokens for s in made)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(found, again)  # faults.md 51: dropout .5 in gpt2's configuration, none here


def test_ratio_is_one_when_nothing_was_updated(folders: dict[str, Path], mesh: DeviceMesh) -> None:
    # faults.md 40, 49: behaviour log-probs from transformers itself; every ratio is 1 and the mismatch 0.
    made = [replace(s, behaviour=rig.reference_logprobs(folders["llama"], s)) for s in rig.samples(3, 4)]
    policy = rig.policy(folders["llama"], mesh)
    optimizer = Keeping(policy.causal_lm.named_parameters(), OptimizerConfig())
    objective = make_objective(AlgorithmConfig(), max_new_tokens=8)
    result = train_step(policy, optimizer, made, objective.minibatches(rig.entries(made), num=1), objective=objective, row_tokens=40, share_prefix=True)
    assert result.sums["ratio"] / result.sums["targets"] == pytest.approx(1.0, abs=1e-5)
    assert float(mismatch_summary(result.log_ratio, clip_low=0.2, clip_high=0.28)["abs_max"]) < 1e-5
    assert result.sums["clipped_high"] == result.sums["clipped_low"] == 0
