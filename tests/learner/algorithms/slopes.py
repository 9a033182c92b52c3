"""Finite differences, and small float64 vectors for hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

STEP = 1e-6


def vector(values: list[float], *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def slope(function: Callable[[Tensor], Tensor], at: list[float]) -> list[float]:
    """d sum(function) / d at, by autograd."""
    point = vector(at, grad=True)
    function(point).sum().backward()
    assert point.grad is not None
    return point.grad.tolist()


def difference(function: Callable[[Tensor], Tensor], at: list[float]) -> list[float]:
    """The same by central differences."""
    result = []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += STEP
        down[i] -= STEP
        result.append((float(function(vector(up)).sum()) - float(function(vector(down)).sum())) / (2 * STEP))
    return result


def finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


logprobs = st.floats(-200.0, 0.0)
numbers = st.floats(-3.0, 3.0)
log_ratios = st.one_of(st.floats(-300.0, 300.0), st.just(0.0))
rewards = st.lists(st.one_of(st.sampled_from([0.0, 1.0, 0.4]), st.floats(-1e3, 1e3)), min_size=1, max_size=8)


def std(values: list[float], ddof: int = 0) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))
