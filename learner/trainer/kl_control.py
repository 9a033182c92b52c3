"""What a KL term's coefficient is multiplied by: 1, or what the measured KL has made of it. Part of every cut, so that a resumed run goes on exactly."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from learner.algorithm_config import AdaptiveKl, KlConfig
from learner.algorithms.kl import adapted_coefficient


class KlControl:
    """Example: `control = KlControl(config.algorithm.kl); control.follow(result.sums); control.factor`"""

    def __init__(self, config: KlConfig | None = None) -> None:
        self._adaptive: AdaptiveKl | None = config.adaptive if config else None
        self._factor = torch.ones((), dtype=torch.float64)

    @property
    def factor(self) -> float:
        return float(self._factor)

    def coefficient(self, kl: KlConfig) -> float:
        """Of a KL term now."""
        return kl.coefficient * self.factor if kl.adaptive is not None else kl.coefficient

    def follow(self, sums: Mapping[str, float]) -> None:
        """After a step, before its policy is saved; `sums` are over all ranks, so all agree. A step without a measured token changes nothing."""
        num_tokens = sums.get("kl_tokens", 0.0)
        if self._adaptive is None or not num_tokens:
            return
        measured = sums["kl"] / num_tokens
        self._factor.fill_(adapted_coefficient(self.factor, measured, target=self._adaptive.target, horizon_steps=self._adaptive.horizon_steps))

    def state(self) -> dict[str, Tensor]:
        """What a cut holds of it, sharing memory: loading writes into it. Empty where it never changes."""
        return {"kl_factor": self._factor} if self._adaptive is not None else {}
