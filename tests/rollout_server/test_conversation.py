"""Turns as strands of ids, by hand (faults.md 55, 57, 59, 60)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_server.conversation import Conversation, Strand, Turn
from rollout_server.spans import Span


def answer(c: Conversation, prompt: list[int], ids: list[int], version: int = 1) -> int:
    return c.answer(prompt, ids=ids, logprobs=[-float(i) for i in ids], spans=(Span(version=version, start=0, end=len(ids)),))


def test_what_is_new_between_two_answers_is_the_environments_and_masked() -> None:
    # faults.md 60: prompt 5 6, answer 7 2, the environment says 8 9, answer 4 2
    c = Conversation()
    answer(c, [5, 6], [7, 2])
    answer(c, [5, 6, 7, 2, 8, 9], [4, 2], version=3)
    assert c.strands == [
        Strand(
            prompt_ids=[5, 6], ids=[7, 2, 8, 9, 4, 2], logprobs=[-7, -2, 0, 0, -4, -2], mask=[1, 1, 0, 0, 1, 1],  # faults.md 57: the stop token 2 is trained
            spans=[Span(version=1, start=0, end=4), Span(version=3, start=4, end=6)],  # what was said belongs to the version before it
        )
    ]  # fmt: skip
    assert c.turns == [Turn(strand=0, start=0, end=2), Turn(strand=0, start=4, end=6)]


def test_a_rewritten_context_begins_a_strand_and_every_answer_is_there_once() -> None:
    # faults.md 55: the second prompt does not begin with 5 6 7 2 (a thought 7 was left out), so it forks; the third goes on from the second
    c = Conversation()
    answer(c, [5, 6], [7, 2])
    answer(c, [5, 6, 2, 9], [4])
    answer(c, [5, 6, 2, 9, 4, 8], [3])
    assert [(s.prompt_ids, s.ids, s.mask) for s in c.strands] == [([5, 6], [7, 2], [1, 1]), ([5, 6, 2, 9], [4, 8, 3], [1, 0, 1])]
    assert c.num_forks == 1 and [turn.strand for turn in c.turns] == [0, 1, 1]
    assert c.shared([5, 6, 2, 9, 4, 1]) == 5 and c.shared([5, 6, 7, 2, 1]) == 4 and c.shared([1]) == 0


def test_two_answers_to_one_prompt_are_two_strands() -> None:
    c = Conversation()
    answer(c, [5], [7])
    answer(c, [5], [8])
    answer(c, [5, 7, 9], [1])  # goes on from the first
    assert [(s.prompt_ids, s.ids) for s in c.strands] == [([5], [7, 9, 1]), ([5], [8])]


def test_of_two_strands_that_fit_the_longer_goes_on() -> None:
    c = Conversation()
    answer(c, [5], [6])
    answer(c, [5, 6, 7, 3], [9], version=2)
    answer(c, [5, 6, 4], [8])  # from 5 6, which has gone on: another strand, whose prompt holds the first answer without training it again
    assert [(s.prompt_ids, s.ids, s.mask) for s in c.strands] == [([5], [6, 7, 3, 9], [1, 0, 0, 1]), ([5, 6, 4], [8], [1])]


def test_versions_never_fall_within_a_strand() -> None:
    c = Conversation()
    answer(c, [5], [7], version=4)
    answer(c, [5, 7, 9], [1], version=3)
    assert [s.spans for s in c.strands] == [[Span(version=4, start=0, end=1)], [Span(version=3, start=0, end=1)]]


def test_an_answer_over_an_update_keeps_both_its_versions() -> None:
    c = Conversation()
    answer(c, [5], [7], version=1)
    c.answer([5, 7, 9, 9], ids=[1, 2, 3], logprobs=[-1, -1, -1], spans=(Span(version=1, start=0, end=1), Span(version=2, start=1, end=3)))
    assert c.strands[0].spans == [Span(version=1, start=0, end=4), Span(version=2, start=4, end=6)]


def test_rewards_of_turns_add_up() -> None:
    c = Conversation()
    assert c.reward_sum is None
    first = answer(c, [5], [7])
    answer(c, [5, 7, 9], [1])
    c.reward(first, 0.25)
    c.reward(first, 0.5)
    assert c.reward_sum == 0.75 and [turn.reward for turn in c.turns] == [0.75, None]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 2), max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=3)), min_size=1, max_size=8))
def test_whatever_is_asked_each_answer_stands_once_after_exactly_its_prompt(asked: list[tuple[int, list[int], list[int]]]) -> None:
    """Each prompt goes on from any earlier prompt and answer, or from nothing."""
    c = Conversation()
    wholes: list[list[int]] = [[9]]
    expected = []
    for back, said, ids in asked:
        prompt = [*wholes[back % len(wholes)], *said]
        answer(c, prompt, ids)
        wholes.append([*prompt, *ids])
        expected.append((prompt, ids))
    found = [([*(s := c.strands[t.strand]).prompt_ids, *s.ids[: t.start]], s.ids[t.start : t.end]) for t in c.turns]
    assert found == expected
    drawn = sorted((t.strand, place) for t in c.turns for place in range(t.start, t.end))
    masked = sorted((number, place) for number, s in enumerate(c.strands) for place, mask in enumerate(s.mask) if mask)
    assert drawn == masked  # every drawn token is trained, once, and nothing else is
    assert all(len(s.ids) == len(s.logprobs) == len(s.mask) == s.spans[-1].end for s in c.strands)
