"""What is known of an unfinished sample grows by reports that follow each other and never contradict."""

from __future__ import annotations

import numpy as np
import pytest

from learner.gateway.parts import Finish, Part, digest_of


def part(start: int, ids: list[int], spans: list[tuple[int, int]], finish: Finish = "") -> Part:
    floats = np.array([-0.1 * token for token in ids], "<f4").tobytes()
    return Part(start=start, ids=np.array(ids, "<i4").tobytes(), logprobs=floats, spans=tuple(spans), finish=finish)


def test_reports_that_follow_each_other_make_one_part() -> None:
    # 2 tokens of version 7, then 3 more: one of 7 and two of 9
    whole = part(0, [1, 2], [(7, 2)]).followed_by(part(2, [3, 4, 5], [(7, 3), (9, 2)], "stop"))
    assert whole == part(0, [1, 2, 3, 4, 5], [(7, 3), (9, 2)], "stop")
    assert (whole.end, whole.num_bytes) == (5, 40)
    assert Part.from_record(whole.to_record()) == whole


def test_the_news_that_a_sample_is_finished_needs_no_tokens() -> None:
    assert part(0, [1, 2], [(7, 2)]).followed_by(part(2, [], [(7, 2)], "length")) == part(0, [1, 2], [(7, 2)], "length")


@pytest.mark.parametrize(
    ("start", "ids", "spans", "words"),
    [
        (1, [3], [(7, 2)], "does not follow 2 tokens"),
        (3, [3], [(7, 4)], "does not follow 2 tokens"),
        (2, [3], [(8, 3)], "contradict"),  # the first two were of version 7
        (2, [3], [(6, 1), (7, 2)], "contradict"),
    ],
)
def test_what_does_not_follow_is_refused(start: int, ids: list[int], spans: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        part(0, [1, 2], [(7, 2)]).followed_by(part(start, ids, spans))


@pytest.mark.parametrize(
    ("start", "ids", "spans", "words"),
    [
        (0, [], [], "must at least say"),
        (0, [1, 2], [(7, 1)], "do not cover"),
        (0, [1, 2], [(7, 3)], "do not cover"),
        (0, [1, 2], [(8, 1), (7, 1)], "must not fall"),
        (0, [1], [(8, 0), (9, 1)], "do not cover"),
    ],
)
def test_a_part_that_is_not_whole_is_refused(start: int, ids: list[int], spans: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        part(start, ids, spans)


def test_log_probs_are_as_many_as_ids() -> None:
    with pytest.raises(ValueError, match="as many"):
        Part(start=0, ids=b"\0" * 8, logprobs=b"\0" * 4, spans=((1, 2),), finish="")


def test_the_digest_tells_other_tokens_apart() -> None:
    assert digest_of(part(0, [1, 2], [(7, 2)]).ids) != digest_of(part(0, [2, 1], [(7, 2)]).ids)
