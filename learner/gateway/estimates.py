"""What a finite evaluation says of a policy, and how surely: means over prompts with their standard errors, and pass@k. Pure, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over prompts. Example: of the prompts' means 1, 0, 1, 1: Estimate(mean=0.75, standard_error=0.25, num_prompts=4)"""

    mean: float
    standard_error: float | None  # None: one prompt says nothing of the spread between prompts
    num_prompts: int

    def to_json(self) -> dict[str, float | int | None]:
        return {"mean": self.mean, "standard_error": self.standard_error, "num_prompts": self.num_prompts}


def over_prompts(values: Sequence[float]) -> Estimate | None:
    """Mean of one value a prompt, with sqrt(sum (x - mean)^2 / (m (m - 1))), m the number of prompts; None without any.

    Samples of one prompt are not independent, so a prompt is one cluster and counts once, however many samples it has. Source: Miller 2024
    ("Adding Error Bars to Evals", arXiv 2411.00640), section 2.2; there clusters weigh by their size, here alike, since every
    prompt was to have as many samples, with the factor m / (m - 1) for few clusters.
    """
    if not values:
        return None
    m, mean = len(values), math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    return Estimate(mean=mean, standard_error=math.sqrt(spread / (m * (m - 1))) if m > 1 else None, num_prompts=m)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is correct: 1 - C(n - c, k) / C(n, k).

    Unbiased for n >= k. Source: Chen et al. 2021 (Codex, arXiv 2107.03374), equation 1. learner/algorithms has the same for tensors' users; the
    gateway imports no torch. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"num_samples={num_samples}, num_correct={num_correct}, k={k}: needs 0 <= num_correct <= num_samples and 1 <= k <= num_samples")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
