"""Samples whose context was rewritten: several strands that weigh as one sample (faults.md 55, 59, 60, 71)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from learner.algorithm_config import AlgorithmConfig, OverlongConfig
from learner.config import OptimizerConfig
from learner.trainer.credit import penalties_of
from learner.trainer.decode import checked_batch
from learner.trainer.objective import make_objective
from learner.trainer.packing import Plan, WeightedSample, dummy_row, pack
from learner.trainer.samples import Sample
from learner.trainer.table import Entry
from learner.trainer.update import train_step
from learner.trainer.values import token_rewards
from protos import arrays
from protos.learner.v1alpha1 import feed_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from tests.learner.trainer import rig
from tests.learner.trainer.fake_feed import table_row
from tests.learner.trainer.gradients import Keeping


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.gpt2(tmp_path_factory.mktemp("model") / "gpt2")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def strand(index: int, place: int, prompt: list[int], completion: list[int], mask: list[int], *, tokens: int, group: str = "g0") -> Sample:
    """tokens: trained ones of the whole sample."""
    return Sample(
        group_id=group, sample_index=index, strand=place, sample_tokens=tokens, prompt_ids=torch.tensor(prompt), completion_ids=torch.tensor(completion),
        behaviour=-2.0 - 0.1 * torch.arange(len(completion), dtype=torch.float32) - index - 0.3 * place, loss_mask=torch.tensor(mask, dtype=torch.bool),
    )  # fmt: skip


def forked() -> list[Sample]:
    """Three samples of one prompt: of two strands with an environment's words between, of one, and of three; 5, 2 and 4 trained tokens."""
    return [
        strand(0, 0, [5, 6], [7, 8, 9, 4, 3], [1, 1, 0, 0, 1], tokens=5), strand(0, 1, [5, 8, 9], [3, 4], [1, 1], tokens=5),
        strand(1, 0, [5, 6], [9, 2], [1, 1], tokens=2),
        strand(2, 0, [5, 6], [4, 4], [1, 1], tokens=4), strand(2, 1, [6, 7], [3], [1], tokens=4), strand(2, 2, [5, 8, 9], [2], [1], tokens=4),
    ]  # fmt: skip


def table(made: list[Sample]) -> list[Entry]:
    """One entry a sample, whatever its strands; rewards 1, 0, 0 ..."""
    entries: dict[tuple[str, int], Entry] = {}
    for s in made:
        key = (s.group_id, s.sample_index)
        fresh = Entry(
            group_id=s.group_id, sample_index=s.sample_index, reward=float(s.sample_index == 0), usable=True, num_prompt_tokens=0, num_completion_tokens=0,
            num_trained_tokens=0, staleness=0, owner=0, truncated=False, num_versions=1, num_strands=0,
        )  # fmt: skip
        e = entries.setdefault(key, fresh)
        entries[key] = replace(
            e, num_prompt_tokens=e.num_prompt_tokens + s.prompt_ids.numel(), num_completion_tokens=e.num_completion_tokens + s.completion_ids.numel(),
            num_trained_tokens=e.num_trained_tokens + s.num_trained_tokens, num_strands=e.num_strands + 1,
        )  # fmt: skip
    return list(entries.values())


def test_strands_of_a_sample_share_a_row_and_count_as_one_sequence() -> None:
    made = [WeightedSample(sample=s, advantage=float(s.sample_index)) for s in forked()]
    (row,) = pack(made, row_tokens=100, share_prefix=True)
    # documents: [5 6 | 7 8 9 4 | 9 | 4], [5 8 9 | 3 | (nothing)], [6 7 | (nothing)]
    assert row.ids.tolist() == [5, 6, 7, 8, 9, 4, 9, 4, 5, 8, 9, 3, 6, 7] and row.document.tolist() == [0] * 8 + [1] * 4 + [2] * 2
    assert row.num_sequences == 3 and row.sequence.tolist() == [0] * 5 + [1] * 2 + [2] * 4
    assert row.target.tolist() == [7, 8, 3, 3, 4, 9, 2, 4, 4, 3, 2]  # sample by sample, its strands in the order of time
    assert row.query.tolist() == [1, 2, 5, 10, 11, 1, 6, 1, 7, 13, 10]
    assert row.sequence_tokens.tolist() == [5] * 5 + [2] * 2 + [4] * 4  # faults.md 59: what was drawn, not what lies between


@pytest.mark.parametrize("row_tokens", [1, 9, 12, 100])
@pytest.mark.parametrize("share", [True, False])
def test_a_sample_is_never_spread_over_rows(row_tokens: int, share: bool) -> None:
    made = [WeightedSample(sample=s, advantage=1.0) for s in forked()]
    plan = Plan(made, row_tokens=row_tokens, share_prefix=share)
    rows = plan.rows(num_rows=max(plan.num_rows, 2))
    found = sorted(tuple(row.behaviour[row.sequence == number].tolist()) for row in rows for number in range(row.num_sequences))
    expected = sorted(tuple(torch.cat([s.behaviour[s.loss_mask] for s in forked() if s.sample_index == index]).tolist()) for index in range(3))
    assert found == expected


def by_hand(folder: Path, made: list[Sample], advantages: Mapping[tuple[str, int], float], aggregation: str, loss: str) -> dict[str, Tensor]:
    """The loss written out: transformers' own forward of each strand by itself, one ratio and one mean a sample."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    total, num_tokens, num_samples = torch.zeros((), dtype=torch.float64), 0, 0
    for index in sorted({s.sample_index for s in made}):
        new, old = [], []
        for s in (s for s in made if s.sample_index == index):
            ids = torch.cat([s.prompt_ids, s.completion_ids])
            logits = model(ids[None]).logits[0, s.prompt_ids.numel() - 1 : -1] / rig.TEMPERATURE
            new.append(torch.log_softmax(logits, -1).gather(1, s.completion_ids[:, None])[:, 0][s.loss_mask])
            old.append(s.behaviour[s.loss_mask])
        difference = torch.cat(new) - torch.cat(old)
        ratio = difference.mean().exp().expand(difference.shape) if loss == "gspo" else difference.exp()
        low, high = (1 - 3e-4, 1 + 4e-4) if loss == "gspo" else (0.8, 1.28)
        advantage = torch.tensor(advantages["g0", index], dtype=torch.float32).double()  # as rows carry it
        losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if loss == "clip" and advantage < 0:
            losses = losses.clamp(max=3 * abs(float(advantage)))
        num_tokens, num_samples = num_tokens + losses.numel(), num_samples + 1
        total = total + (losses.sum() if aggregation == "token_mean" else losses.mean())
    (total / (num_tokens if aggregation == "token_mean" else num_samples)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("aggregation", "algorithm"), [("token_mean", "clip"), ("sequence_mean", "clip"), ("sequence_mean", "gspo")])
@pytest.mark.parametrize(("row_tokens", "share"), [(100, True), (9, True), (100, False)])
def test_the_gradient_is_that_of_samples_and_not_of_strands(aggregation: str, algorithm: str, row_tokens: int, share: bool, folder: Path, mesh: DeviceMesh) -> None:
    made = forked()
    loss: dict[str, Any] = {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4} if algorithm == "gspo" else {"kind": "clip"}
    objective = make_objective(AlgorithmConfig.model_validate({"aggregation": aggregation, "loss": loss}), max_new_tokens=8)
    (minibatch,) = objective.minibatches(table(made), num=1)
    # faults.md 71: rewards 1, 0, 0 of three samples in six strands: mean 1/3, not that of the strands, 2/6
    assert (minibatch.counts.num_sequences, minibatch.counts.num_tokens) == (3, 11)
    deviation = (2 / 9) ** 0.5
    assert [minibatch.advantages["g0", i] for i in range(3)] == pytest.approx([(2 / 3) / deviation, (-1 / 3) / deviation, (-1 / 3) / deviation], rel=1e-5)
    policy = rig.policy(folder, mesh, torch.float64)
    optimizer = Keeping(policy.causal_lm.named_parameters(), OptimizerConfig())
    train_step(policy, optimizer, made, [minibatch], objective=objective, row_tokens=row_tokens, share_prefix=share)
    expected = by_hand(folder, made, minibatch.advantages, aggregation, algorithm)
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((optimizer.gradients[name] - gradient).abs().max()) <= 1e-9 * scale, name


def test_what_an_environment_said_moves_no_gradient(folder: Path, mesh: DeviceMesh) -> None:
    # faults.md 60: other log-probs at the environment's tokens, the same gradient to the bit
    def gradient(filler: float) -> dict[str, Tensor]:
        made = [replace(s, behaviour=torch.where(s.loss_mask, s.behaviour, filler)) for s in forked()]
        objective = make_objective(AlgorithmConfig(), max_new_tokens=8)
        policy = rig.policy(folder, mesh, torch.float64)
        optimizer = Keeping(policy.causal_lm.named_parameters(), OptimizerConfig())
        train_step(policy, optimizer, made, objective.minibatches(table(made), num=1), objective=objective, row_tokens=100, share_prefix=True)
        return optimizer.gradients

    zeros, ones = gradient(0.0), gradient(1.0)
    assert all(torch.equal(zeros[name], ones[name]) for name in zeros) and any(float(g.abs().max()) > 0 for g in zeros.values())


def test_an_answer_is_as_long_as_what_was_drawn() -> None:
    # faults.md 59: mask 000 1111 000 11111 is nine tokens long and not twelve: at most 10 with a buffer of 5, (9 - 5) / 5 of the punishment
    mask = [0] * 3 + [1] * 4 + [0] * 3 + [1] * 5
    made = strand(0, 0, [5], list(range(15)), mask, tokens=9)
    (entry,) = table([made])
    entry = replace(entry, num_turns=2)
    assert penalties_of([entry], OverlongConfig(buffer_tokens=5), 10).tolist() == pytest.approx([-0.8])


def test_staleness_of_a_token_counts_from_the_oldest_of_its_sample() -> None:
    # oldest version 3 at staleness 2: a strand drawn by 4 and 5 is 1 and 0 steps old
    made = replace(strand(0, 1, [5], [7, 8], [1, 1], tokens=4), token_versions=torch.tensor([4, 5]), first_version=3)
    (row,) = pack([WeightedSample(sample=made, advantage=1.0, staleness=2)], row_tokens=10, share_prefix=True)
    assert row.staleness.tolist() == [1, 0]


def test_rewards_by_turn_come_at_the_ends_of_turns_and_the_rest_at_the_end() -> None:
    # two turns of 2 tokens, 0.5 for the first; the sample's reward is 2 in all, so 1.5 comes at its end. The other sample was given nothing by turn
    row = replace(
        dummy_row(), target=torch.zeros(5, dtype=torch.int64), sequence=torch.tensor([0, 0, 0, 0, 1]), num_sequences=2, advantage=torch.tensor([2.0] * 4 + [-1.0]),
        turn_reward=torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0]),
    )  # fmt: skip
    assert token_rewards(row, None).tolist() == [0.0, 0.5, 0.0, 1.5, -1.0]


def message() -> pb.Trajectory:
    """Two turns, the second after its context was rewritten."""
    more = pb.Strand(
        prompt_ids=arrays.pack_ids([5, 8, 9]), completion_ids=arrays.pack_ids([3, 4]), logprobs=arrays.pack_floats([-1, -2]), spans=[pb.VersionSpan(version=8, start=0, end=2)]
    )  # fmt: skip
    return pb.Trajectory(
        group_id="g0", sample_index=1, prompt_ids=arrays.pack_ids([5, 6]), completion_ids=arrays.pack_ids([7, 8, 9]), logprobs=arrays.pack_floats([-1, 0, -3]),
        loss_mask=arrays.pack_mask([1, 0, 1]), spans=[pb.VersionSpan(version=7, start=0, end=3)], more_strands=[more],
        turns=[pb.Turn(strand=0, start=0, end=1, reward=0.25), pb.Turn(strand=0, start=2, end=3), pb.Turn(strand=1, start=0, end=2, reward=1.0)],
    )  # fmt: skip


def test_strands_survive_the_wire() -> None:
    entry = Entry(
        group_id="g0", sample_index=1, reward=1.25, usable=True, num_prompt_tokens=5, num_completion_tokens=5, num_trained_tokens=4, staleness=0, owner=0, truncated=False,
        num_versions=2, num_strands=2, num_turns=3,
    )  # fmt: skip
    header = feed_pb2.BatchHeader(table=[table_row(entry)])
    header.table[0].num_strands, header.table[0].num_turns = 2, 3
    batch = checked_batch(header, [message()], rank=0)
    assert (batch.table[0].num_strands, batch.table[0].num_turns) == (2, 3)
    first, second = batch.samples
    assert (first.strand, second.strand) == (0, 1) and first.num_sample_tokens == second.num_sample_tokens == 4
    assert second.prompt_ids.tolist() == [5, 8, 9] and second.completion_ids.tolist() == [3, 4] and second.behaviour.tolist() == [-1, -2]
    assert first.first_version == second.first_version == 7 and second.token_versions is not None and second.token_versions.tolist() == [8, 8]
    assert first.turn_rewards is not None and first.turn_rewards.tolist() == [0.25, 0.0, 0.0]
    assert second.turn_rewards is not None and second.turn_rewards.tolist() == [0.0, 1.0]
    header.table[0].num_completion_tokens = 3  # those of the first strand alone
    with pytest.raises(ValueError, match=r"sample \('g0', 1\): the table says \(5, 3, 4\).* has \(5, 5, 4\)"):
        checked_batch(header, [message()], rank=0)
