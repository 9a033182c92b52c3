"""Probability ratios that can neither overflow nor hide a NaN."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is far outside any clip and far inside float32


def bounded(log_ratio: Tensor) -> Tensor:
    """log_ratio within +-MAX_LOG_RATIO, gradient 0 beyond; NaN passes through."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of the bounded log-ratio: value and gradient are finite for every finite input; NaN passes through."""
    return bounded(log_ratio).exp()


def same_length(**tensors: Tensor) -> None:
    """Raises ValueError, naming all shapes, unless all are [n] of one n."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"{', '.join(f'{name} {shape}' for name, shape in shapes.items())}: all must be [num_tokens] of one num_tokens")
