"""The critic's loss by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from torch import Tensor

from learner.algorithms.value_loss import clipped_value_loss
from tests.learner.algorithms import slopes


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        (1.1, 0.5 * 0.9**2, -0.9),  # within the clip: half the square
        (1.5, 0.5 * 0.8**2, 0.0),  # towards the return, but beyond old + .2: the clipped one is larger
        (0.5, 0.5 * 1.5**2, -1.5),  # away from the return: whole gradient back
    ],
)
def test_the_larger_of_plain_and_clipped(value: float, loss: float, gradient: float) -> None:
    def function(v: Tensor) -> Tensor:
        return clipped_value_loss(v, slopes.vector([1.0]), slopes.vector([2.0]), clip=0.2)[0]

    assert float(function(slopes.vector([value]))) == pytest.approx(loss)
    assert slopes.slope(function, [value]) == pytest.approx([gradient])
    assert slopes.difference(function, [value]) == pytest.approx([gradient], abs=1e-5)


def test_without_a_clip_it_is_half_the_square() -> None:
    loss, metrics = clipped_value_loss(slopes.vector([3.0]), slopes.vector([0.0]), slopes.vector([1.0]), clip=None)
    assert loss.tolist() == [2.0] and int(metrics["clipped_value"]) == 0


@given(slopes.numbers, slopes.numbers, slopes.numbers)
def test_clipping_never_makes_the_loss_smaller(value: float, old: float, target: float) -> None:
    plain = clipped_value_loss(slopes.vector([value]), slopes.vector([old]), slopes.vector([target]), clip=None)[0]
    clipped = clipped_value_loss(slopes.vector([value]), slopes.vector([old]), slopes.vector([target]), clip=0.2)[0]
    assert float(clipped) >= float(plain)
