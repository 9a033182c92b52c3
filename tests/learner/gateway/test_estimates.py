"""Means over prompts with their standard errors, and pass@k without torch: worked by hand, and against slow transcripts."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.gateway.estimates import Estimate, over_prompts, pass_at_k
from learner.gateway.evaluation import Answer, Evaluation
from learner.gateway.evaluation_result import result_of, words


@pytest.mark.parametrize(("n", "c", "k", "expected"), [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 0, 2, 0.0), (4, 4, 2, 1.0), (5, 2, 4, 1.0), (10, 3, 2, 1 - 21 / 45)])
def test_pass_at_k_has_the_values_of_the_torch_one(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_member(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    subsets = list(itertools.combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_impossible_counts_are_refused() -> None:
    for n, c, k in ((4, 5, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match=f"num_samples={n}, num_correct={c}, k={k}"):
            pass_at_k(n, c, k)


def test_the_standard_error_is_of_prompts_not_of_samples() -> None:
    # 1, 0, 1, 1: mean .75, squares .0625 * 3 + .5625 = .75, / (4 * 3) = .0625, root .25
    assert over_prompts([1, 0, 1, 1]) == Estimate(mean=0.75, standard_error=0.25, num_prompts=4)
    assert over_prompts([0.3]) == Estimate(mean=0.3, standard_error=None, num_prompts=1)
    assert over_prompts([]) is None


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=2, max_size=8))
def test_with_equal_clusters_it_is_millers_clustered_error_with_the_factor_for_few_clusters(clusters: list[list[float]]) -> None:
    found = over_prompts([sum(cluster) / 3 for cluster in clusters])
    assert found is not None
    m, n = len(clusters), 3 * len(clusters)
    mean = sum(map(sum, clusters)) / n
    cross = sum((a - mean) * (b - mean) for cluster in clusters for a in cluster for b in cluster)  # Miller 2024, section 2.2, written out
    assert found.standard_error == pytest.approx(math.sqrt(max(cross, 0.0)) / n * math.sqrt(m / (m - 1)), abs=1e-6)


def answer(score: float | None, version: int = 7, **changes: object) -> Answer:
    fields = {"score": score, "unscored": "" if score is not None else "timeout", "num_tokens": 4, "truncated": False, "tokens_by_version": ((version, 4),)}
    return Answer(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_result_says_greedy_sampled_and_pass_at_k_each_with_its_error_and_what_is_missing() -> None:
    evaluation = Evaluation(serial=0, step=20, version=7, lineage=0, num_prompts=4, num_samples=2, greedy=True, fingerprint="f", lent={0, 1, 2})
    evaluation.answers = {
        0: {0: answer(1.0), 1: answer(0.0), 2: answer(1.0)},
        1: {0: answer(0.0), 1: answer(None), 2: answer(0.0, tokens_by_version=((7, 1), (8, 3)))},
        2: {0: answer(1.0, truncated=True)},
    }
    found = result_of(evaluation, k=(1, 2), threshold=0.5, reason="deadline")
    # greedy 1, 0: mean .5, error sqrt(.5 / 2) = .5. sampled .5, 0, 1: mean .5, squares .5, / 6, root .288675.
    assert found["greedy"] == {"mean": 0.5, "standard_error": 0.5, "num_prompts": 2} and found["score"] == 0.5 and found["standard_error"] == 0.5
    assert found["sampled"] == {"mean": 0.5, "standard_error": pytest.approx(0.288675, abs=1e-6), "num_prompts": 3}
    # pass@2 only of prompt 0, which has two scores, one of them right: 1 - C(1, 2) / C(2, 2) = 1
    assert found["pass_at_k"]["2"] == {"mean": 1.0, "standard_error": None, "num_prompts": 1}
    assert found["pass_at_k"]["1"]["mean"] == 0.5
    # four prompts of three; three lent; seven came, one of them without a score; the two of prompt 2 are lost
    assert [found[name] for name in ("wanted", "leased", "scored", "unscored", "lost")] == [12, 9, 6, 1, 2] and found["unscored_reasons"] == {"timeout": 1}
    assert found["tokens_by_version"] == {"7": 25, "8": 3} and (found["num_versions"], found["mixed_version_samples"]) == (2, 1)
    assert found["truncated_share"] == pytest.approx(1 / 7) and found["ended"] == "deadline"
    assert words(found) == "greedy 0.500 ± 0.500, sampled 0.500 ± 0.289, pass@1 0.500 ± 0.289, pass@2 1.000 (4 prompts, ended by deadline with 6 of 12 samples scored)"


def test_without_any_answer_nothing_is_estimated() -> None:
    evaluation = Evaluation(serial=0, step=1, version=1, lineage=0, num_prompts=1, num_samples=0, greedy=True, fingerprint="f")
    found = result_of(evaluation, k=(), threshold=0.5, reason="deadline")
    assert found["score"] is None and found["greedy"] is None and found["completion_tokens_mean"] is None
    assert words(found).startswith("no score (1 prompts, ended by deadline")
