"""DPPO by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.divergence_loss import binary_kl, binary_total_variation, divergence_loss
from tests.learner.algorithms import slopes


def logs(*p: float) -> torch.Tensor:
    return slopes.vector([math.log(x) for x in p])


def test_divergences_of_two_outcomes_by_hand() -> None:
    # p .8, q .5: |.3|; .5 log(.5/.8) + .5 log(.5/.2) = .5 * (-.470004 + .916291) = .223144
    assert float(binary_total_variation(logs(0.8), logs(0.5))) == pytest.approx(0.3)
    assert float(binary_kl(logs(0.8), logs(0.5))) == pytest.approx(0.2231436)


@given(st.floats(1e-6, 1 - 1e-6), st.floats(1e-6, 1 - 1e-6))
def test_binary_kl_is_the_definition_and_never_negative(p: float, q: float) -> None:
    expected = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    assert float(binary_kl(logs(p), logs(q))) == pytest.approx(expected, rel=1e-5, abs=1e-7) and expected >= -1e-12


@pytest.mark.parametrize(
    ("p", "q", "advantage", "gradient"),
    [
        (0.9, 0.5, 1.0, 0.0),  # moves away (r 1.8 > 1, A > 0) and .4 > .2: masked
        (0.9, 0.5, -1.0, 1.8),  # comes back: kept with its whole ratio
        (0.1, 0.5, -1.0, 0.0),  # moves away on the other side
        (0.1, 0.5, 1.0, -0.2),
        (0.02, 0.01, 1.0, -2.0),  # a rare token may double: .01 of total variation
    ],
)
def test_a_token_is_masked_only_where_it_leaves_the_region(p: float, q: float, advantage: float, gradient: float) -> None:
    old = logs(q)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return divergence_loss(x, old, slopes.vector([advantage]), binary_total_variation(x, old), threshold=0.2)[0]

    point = [math.log(p)]
    assert slopes.slope(loss, point) == pytest.approx([gradient])
    assert slopes.difference(loss, point) == pytest.approx([gradient], abs=1e-6)


@given(slopes.logprobs, slopes.logprobs, st.sampled_from([0.0, 1.0, -1.0]))
def test_any_pair_is_finite(p: float, q: float, advantage: float) -> None:
    for distance in (binary_kl, binary_total_variation):
        old = slopes.vector([q])

        def loss(x: torch.Tensor, distance=distance, old=old) -> torch.Tensor:
            return divergence_loss(x, old, slopes.vector([advantage]), distance(x, old), threshold=0.1)[0]

        assert slopes.finite(distance(slopes.vector([p]), old)) and math.isfinite(slopes.slope(loss, [p])[0])
