"""Soft punishment of length, by hand."""

from __future__ import annotations

import pytest
import torch

from learner.algorithms.overlong import overlong_penalty


def test_it_grows_over_the_buffer_and_is_whole_for_what_was_cut_off() -> None:
    # limit 10, buffer 4: 0 up to 6, then -.25 a token
    lengths = torch.tensor([1, 6, 7, 9, 12, 5])
    truncated = torch.tensor([False, False, False, False, False, True])
    assert overlong_penalty(lengths, max_tokens=10, buffer_tokens=4, truncated=truncated).tolist() == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]


def test_a_buffer_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer_tokens=11"):
        overlong_penalty(torch.tensor([1]), max_tokens=10, buffer_tokens=11, truncated=torch.tensor([False]))
