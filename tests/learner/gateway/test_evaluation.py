"""The account of evaluations: it balances in every life, and its records make the same state."""

from __future__ import annotations

import random

import msgpack
import pytest

from learner.gateway.evaluation import Answer, Evaluations, group_name, parsed
from learner.gateway.groups import seq_of


def test_names_are_told_apart_from_those_of_training_groups() -> None:
    assert group_name(3, 17) == "e000003-00000017" and parsed("e000003-00000017") == (3, 17)
    for other in ("g00000017", "e3-17", "e000003", "e000003-0000001x", "", "e-"):
        assert parsed(other) is None
    assert seq_of("e000003-00000017") is None


def begun(evaluations: Evaluations, step: int, num_prompts: int = 5) -> dict[str, object]:
    return evaluations.begin(step=step, version=step + 1, lineage=0, num_prompts=num_prompts, num_samples=2, greedy=True, fingerprint="f")


@pytest.mark.parametrize("seed", range(20))
def test_every_life_balances_and_its_records_give_the_same_state(seed: int) -> None:
    chance, live, records = random.Random(seed), Evaluations(), []
    for step in range(6):
        records.append(begun(live, step))
        for _ in range(chance.randrange(40)):
            current = live.current
            assert current is not None
            group, index = chance.randrange(5), chance.randrange(3)
            if chance.random() < 0.4:
                record = live.lend(group)
            elif group in current.lent and group not in current.lost and index not in current.answers.get(group, ()):
                score = None if chance.random() < 0.2 else chance.random()
                record = live.answer(group, index, Answer(score=score, unscored="" if score is not None else "timeout", num_tokens=1, truncated=False, tokens_by_version=((step + 1, 1),)))
            else:
                record = live.lose([group], "attempts") if group in current.lent and chance.random() < 0.1 else None
            records += [record] if record else []
            counts = live.counts()
            assert counts["leased"] == counts["scored"] + counts["unscored"] + counts["lost"] + counts["open"]
        records.append(live.end(chance.choice(["", "deadline", "rolled_back"]), {"step": step}))
        assert live.counts()["open"] == 0
    stored = [msgpack.unpackb(msgpack.packb(record)) for record in records]
    middle = chance.randrange(len(stored))
    first = Evaluations()
    for record in stored[:middle]:
        first.apply(record)
    second = Evaluations.from_state(msgpack.unpackb(msgpack.packb(first.to_state()), strict_map_key=False))
    for record in stored[middle:]:
        second.apply(record)
    assert second.to_state() == live.to_state()


def test_a_step_whose_evaluation_was_given_up_is_due_again() -> None:
    evaluations = Evaluations()
    begun(evaluations, 10)
    evaluations.end("rolled_back", None)
    assert evaluations.seen == set() and evaluations.last is None
    begun(evaluations, 10)
    evaluations.end("deadline", {"step": 10})
    assert evaluations.seen == {10} and evaluations.last == {"step": 10} and evaluations.next_serial == 2


def test_what_was_lent_and_never_came_is_lost_and_what_was_never_lent_is_not() -> None:
    evaluations = Evaluations()
    begun(evaluations, 1)
    evaluations.lend(0)
    evaluations.answer(0, 2, Answer(score=1.0, unscored="", num_tokens=1, truncated=False, tokens_by_version=((2, 1),)))
    evaluations.end("deadline", {"step": 1})
    assert dict(evaluations.counts()) == {"leased": 3, "scored": 1, "lost": 2}


def test_an_unknown_record_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown type 'evaluation_sung'"):
        Evaluations().apply({"type": "evaluation_sung"})
