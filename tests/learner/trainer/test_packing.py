"""Packed rows and their mask, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.trainer import update
from learner.trainer.mask import PROMPT, attention_mask
from learner.trainer.packing import Plan, Row, WeightedSample, dummy_row, pack
from learner.trainer.samples import Sample
from learner.trainer.table import Counts, Minibatch
from tests.learner.trainer import rig


def sample(prompt: list[int], completion: list[int], *, group: str = "g", index: int = 0, mask: list[int] | None = None) -> WeightedSample:
    made = Sample(
        group_id=group, sample_index=index, prompt_ids=torch.tensor(prompt), completion_ids=torch.tensor(completion),
        behaviour=-torch.tensor(completion, dtype=torch.float32), loss_mask=torch.tensor(mask or [1] * len(completion), dtype=torch.bool),
    )  # fmt: skip
    return WeightedSample(sample=made, advantage=float(index + 1))


def test_two_branches_share_their_prompt() -> None:
    (row,) = pack([sample([5, 6], [7, 2]), sample([5, 6], [8], index=1), sample([5, 6], [9, 3, 2], index=2)], row_tokens=64, share_prefix=True)
    assert row.ids.tolist() == [5, 6, 7, 9, 3]  # the last token of a completion predicts nothing
    assert row.position.tolist() == [0, 1, 2, 2, 3]
    assert row.branch.tolist() == [PROMPT, PROMPT, 0, 2, 2]
    assert row.query.tolist() == [1, 2, 1, 1, 3, 4]
    assert row.target.tolist() == [7, 2, 8, 9, 3, 2]
    assert row.advantage.tolist() == [1, 1, 2, 3, 3, 3]
    assert row.behaviour.tolist() == [-7, -2, -8, -9, -3, -2]
    assert row.sequence_tokens.tolist() == [2, 2, 1, 3, 3, 3]


def test_targets_never_cross_a_border() -> None:
    # faults.md 48: [10 | 11, 12] and [20 | 21] in one row: 11 after 10, 12 after 11, 21 after 20, and nothing after 12 or 21
    (row,) = pack([sample([10], [11, 12], group="a"), sample([20], [21], group="b")], row_tokens=64, share_prefix=True)
    pairs = {(int(row.ids[q]), int(t)) for q, t in zip(row.query, row.target, strict=True)}
    assert pairs == {(10, 11), (11, 12), (20, 21)}
    assert row.document.tolist() == [0, 0, 1] and row.position.tolist() == [0, 1, 0]


def test_a_branch_sees_its_prompt_and_itself_only() -> None:
    # prompt p p, branches a a and b, then another document q
    document, branch = torch.tensor([0, 0, 0, 0, 0, 1]), torch.tensor([PROMPT, PROMPT, 0, 0, 1, PROMPT])
    assert attention_mask(document, branch)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_masked_tokens_are_read_but_not_trained_on() -> None:
    (row,) = pack([sample([5], [7, 8, 9], mask=[1, 0, 1])], row_tokens=64, share_prefix=True)
    assert row.ids.tolist() == [5, 7, 8]
    assert row.target.tolist() == [7, 9] and row.query.tolist() == [0, 2]
    assert row.sequence_tokens.tolist() == [2, 2]


def test_a_sample_longer_than_the_budget_gets_its_own_row_whole() -> None:
    # faults.md 93: budget 100, input lengths 60, 60, 101
    made = [sample([1], list(range(1, n + 1)), group=str(i)) for i, n in enumerate((60, 60, 101))]
    rows = pack(made, row_tokens=100, share_prefix=True)
    assert sorted(row.ids.numel() for row in rows) == [60, 60, 101]
    assert sum(row.num_targets for row in rows) == 60 + 60 + 101


def test_a_group_too_long_for_a_row_repeats_its_prompt() -> None:
    # prompt of 4, three bodies of 3: two fit into 10 tokens
    made = [sample([1, 2, 3, 4], [5, 6, 7, 8], index=i) for i in range(3)]
    assert sorted(row.ids.numel() for row in pack(made, row_tokens=10, share_prefix=True)) == [7, 10]


def test_a_sample_without_a_trained_token_makes_no_row() -> None:
    assert pack([sample([1], [2, 3], mask=[0, 0])], row_tokens=10, share_prefix=True) == []


def test_samples_of_a_group_with_different_prompts_have_documents_of_their_own() -> None:
    # prompts [1], [3], [1]: the first and the third share theirs, the second fits beside them
    (row,) = pack([sample([1], [2, 4]), sample([3], [2], index=1), sample([1], [5, 6], index=2)], row_tokens=10, share_prefix=True)
    assert row.ids.tolist() == [1, 2, 5, 3] and row.document.tolist() == [0, 0, 0, 1] and row.target.tolist() == [2, 4, 5, 6, 2]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.booleans(), st.integers(0, 1000))
def test_every_trained_token_is_a_target_once_and_budgets_hold(row_tokens: int, share: bool, seed: int) -> None:
    made = rig.samples(4, 3, seed=seed)
    rows = pack([WeightedSample(sample=s, advantage=1.0) for s in made], row_tokens=row_tokens, share_prefix=share)
    expected = sorted(float(b) for s in made for b in s.behaviour[s.loss_mask])
    assert sorted(float(b) for row in rows for b in row.behaviour) == expected
    longest = max(s.prompt_ids.numel() + s.completion_ids.numel() - 1 for s in made)
    assert all(row.ids.numel() <= max(row_tokens, longest) for row in rows)
    assert all(_document_is_one_prompt_and_branches(row) for row in rows)


def _document_is_one_prompt_and_branches(row: Row) -> bool:
    for document in row.document.unique():
        here = row.document == document
        prompt = int((row.branch[here] == PROMPT).sum())
        for branch in row.branch[here].unique():
            positions = row.position[here & (row.branch == branch)]
            start = 0 if int(branch) == PROMPT else prompt
            if positions.tolist() != list(range(start, start + positions.numel())):
                return False
    return True


def test_a_dummy_row_has_a_token_and_no_target() -> None:
    row = dummy_row()
    assert row.ids.numel() == 1 and row.num_targets == 0


def test_array_lengths_that_disagree_are_refused() -> None:
    # faults.md 49, 50
    with pytest.raises(ValueError, match=r"2 completion ids but 3 logprobs"):
        Sample(group_id="g", sample_index=0, prompt_ids=torch.tensor([1]), completion_ids=torch.tensor([1, 2]), behaviour=torch.zeros(3), loss_mask=torch.ones(2, dtype=torch.bool))


def test_a_log_prob_that_is_not_finite_is_refused() -> None:
    # faults.md 47
    with pytest.raises(ValueError, match="not finite"):
        Sample(group_id="g", sample_index=0, prompt_ids=torch.tensor([1]), completion_ids=torch.tensor([1]), behaviour=torch.tensor([float("nan")]), loss_mask=torch.tensor([True]))


def test_rows_that_other_ranks_need_too_are_filled_evenly_by_cost() -> None:
    # faults.md 92: inputs of 60, 30, 30 and 20 tokens need two rows of 100; where another rank has three, the three carry 60, 50 (30 + 20) and 30
    made = [sample([1], list(range(1, n + 1)), group=str(i)) for i, n in enumerate((60, 30, 30, 20))]
    plan = Plan(made, row_tokens=100, share_prefix=True)
    assert plan.num_rows == 2
    assert sorted(row.ids.numel() for row in plan.rows(num_rows=3)) == [30, 50, 60]
    # 50, 30, 30 and 5 over two rows by tokens: 50 + 5 | 30 + 30. One token as dear as ten pairs: 50 costs 50 + 1275 / 10 = 177.5 and 30 + 30 only 153: 5 goes there
    other = Plan([sample([1], list(range(1, n + 1)), group=str(i)) for i, n in enumerate((50, 30, 30, 5))], row_tokens=100, share_prefix=True)
    assert sorted(row.ids.numel() for row in other.rows(num_rows=2)) == [55, 60]
    assert sorted(row.ids.numel() for row in other.rows(num_rows=2, pairs_per_token=10)) == [50, 65]
    assert len(plan.rows(num_rows=9)) == 4  # no more than there are documents


@pytest.mark.parametrize(("lengths", "rows"), [([95] * 5, [95] * 5), ([20] * 5, [20] * 5), ([20] * 3, [20, 20, 20, 1, 1])])
def test_every_rank_computes_the_rows_agreed_and_fills_up_with_dummies(monkeypatch: pytest.MonkeyPatch, lengths: list[int], rows: list[int]) -> None:
    # faults.md 92: budget 100: 5 x 95 tokens need five rows, 5 x 20 or 3 x 20 one; all compute five, the last rank two of them without a target
    monkeypatch.setattr(update, "_largest", lambda counts: [max(5, count) for count in counts])
    made = [sample([1], list(range(1, n + 1)), group=str(i)).sample for i, n in enumerate(lengths)]
    advantages = {(s.group_id, s.sample_index): 1.0 for s in made}
    policy: Any = SimpleNamespace(device=torch.device("cpu"), pairs_per_token=1 << 40)
    (found,) = update._rows(policy, made, [Minibatch(advantages=advantages, counts=Counts(num_tokens=sum(lengths), num_sequences=len(lengths)))], 100, True)
    assert [row.ids.numel() for row in found] == rows
    assert sum(row.num_targets for row in found) == sum(lengths) and [row.num_targets for row in found if row.ids.numel() == 1] == [0] * rows.count(1)


def test_where_even_rows_would_not_fit_the_first_ones_stay() -> None:
    # 60, 50, 40, 30, 20 into two rows of 100: evenly 60 | 50 + 40, 30 to the first (90), and 20 fits nowhere; first fit has three rows
    made = [sample([1], list(range(1, n + 1)), group=str(i)) for i, n in enumerate((60, 50, 40, 30, 20))]
    plan = Plan(made, row_tokens=100, share_prefix=True)
    rows = plan.rows(num_rows=plan.num_rows)
    assert sum(row.num_targets for row in rows) == 200 and all(row.ids.numel() <= 100 for row in rows)
