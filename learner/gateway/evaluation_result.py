"""What a finished evaluation found, as metrics.jsonl has it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from learner.gateway.estimates import Estimate, over_prompts, pass_at_k
from learner.gateway.evaluation import Evaluation


def result_of(evaluation: Evaluation, *, k: Sequence[int], threshold: float, reason: str) -> dict[str, Any]:
    """Numbers of an evaluation that ends for a reason ("": all was answered). JSON-able; what could not be estimated is None or absent.

    score: the greedy mean where greedy answers were asked for, else the sampled mean. A sample without a score is in no mean. Tokens by
    version say which policies answered: more than one version, since training went on meanwhile.
    """
    greedy, sampled = _scores(evaluation, greedy=True), _scores(evaluation, greedy=False)
    found: dict[str, Any] = {}
    if evaluation.greedy:
        found["greedy"] = _json(over_prompts([_mean(scores) for scores in greedy]))
    if evaluation.num_samples:
        found["sampled"] = _json(over_prompts([_mean(scores) for scores in sampled]))
        found["pass_at_k"] = {str(size): _json(_pass_at(sampled, size, threshold)) for size in k}
    chosen = found["greedy"] if evaluation.greedy else found["sampled"]
    return {
        "score": chosen and chosen["mean"],
        "standard_error": chosen and chosen["standard_error"],
        **found,
        "ended": reason or "complete",
        "num_prompts": evaluation.num_prompts,
        **_account(evaluation),
        **_answers(evaluation),
    }


def words(result: dict[str, Any]) -> str:
    """For people: `greedy 0.412 ± 0.021, pass@8 0.700 ± 0.030 (300 prompts)`; says so where it ended before all was answered."""
    pairs = [("greedy", result.get("greedy")), ("sampled", result.get("sampled")), *((f"pass@{k}", value) for k, value in result.get("pass_at_k", {}).items())]
    parts = [f"{name} {value['mean']:.3f}" + (f" ± {value['standard_error']:.3f}" if value["standard_error"] is not None else "") for name, value in pairs if value]
    ended = "" if result["ended"] == "complete" else f", ended by {result['ended']} with {result['scored']} of {result['wanted']} samples scored"
    return f"{', '.join(parts) or 'no score'} ({result['num_prompts']} prompts{ended})"


def _scores(evaluation: Evaluation, *, greedy: bool) -> list[list[float]]:
    """Scores of each prompt that has one."""
    found: dict[int, list[float]] = {}
    for group, index, answer in evaluation.all_answers():
        if answer.score is not None and (index == evaluation.num_samples) == greedy:
            found.setdefault(group, []).append(answer.score)
    return list(found.values())


def _pass_at(sampled: Sequence[Sequence[float]], k: int, threshold: float) -> Estimate | None:
    """Over the prompts with k scores or more: of fewer there is no unbiased estimate."""
    return over_prompts([pass_at_k(len(scores), sum(score >= threshold for score in scores), k) for scores in sampled if len(scores) >= k])


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def _json(estimate: Estimate | None) -> dict[str, float | int | None] | None:
    return estimate.to_json() if estimate else None


def _account(evaluation: Evaluation) -> dict[str, Any]:
    """In samples, at its end: what is open now is lost. wanted - leased were never asked for."""
    counts = evaluation.counts()
    reasons = Counter(answer.unscored for _, _, answer in evaluation.all_answers() if answer.score is None)
    return {
        "wanted": evaluation.num_wanted,
        "leased": counts["leased"],
        "scored": counts["scored"],
        "unscored": counts["unscored"],
        "lost": counts["lost"] + counts["open"],
        "unscored_reasons": dict(reasons),
    }


def _answers(evaluation: Evaluation) -> dict[str, Any]:
    answers = [answer for _, _, answer in evaluation.all_answers()]
    tokens: Counter[int] = Counter()
    for answer in answers:
        tokens.update(dict(answer.tokens_by_version))
    return {
        "tokens_by_version": {str(version): count for version, count in sorted(tokens.items())},
        "num_versions": len(tokens),
        "mixed_version_samples": sum(len(answer.tokens_by_version) > 1 for answer in answers),
        "completion_tokens_mean": _mean([answer.num_tokens for answer in answers]) if answers else None,
        "truncated_share": _mean([float(answer.truncated) for answer in answers]) if answers else None,
    }
