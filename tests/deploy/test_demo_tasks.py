"""The tasks of demo and smoke: repeatable, and no held-out question in training."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.demo import sorting, task


def test_no_held_out_question_is_trained_on_whatever_the_seeds() -> None:
    held_out = {each.prompt for each in task.held_out(300, seed=0)}
    for seed in (0, 1):
        assert not held_out & {each.prompt for each in task.training(2000, seed=seed)}


def test_held_out_questions_differ_and_are_the_same_again() -> None:
    tasks = task.held_out(300, seed=3)
    assert len({each.prompt for each in tasks}) == 300
    assert tasks == task.held_out(300, seed=3)
    assert tasks != task.held_out(300, seed=4)


def test_an_answer_is_the_value_of_its_expression() -> None:
    for each in task.training(50, seed=0):
        left, sign, right = each.expression.split()
        assert int(each.answer) == int(left) + int(right) * (1 if sign == "+" else -1)
        assert f" {each.expression} =" in each.prompt


def test_a_task_can_be_made_again_from_its_id() -> None:
    import reasoning_gym

    each = task.training(3, seed=5)[2]
    seed = int(each.id.rsplit("-", 1)[1])
    dataset = reasoning_gym.create_dataset(task.GENERATOR, size=1, seed=seed, **task.PARAMETERS)
    assert (dataset[0]["question"], dataset[0]["answer"]) == (each.prompt, each.answer)


def test_a_written_file_reads_back(tmp_path: Path) -> None:
    tasks = task.held_out(5, seed=0)
    task.write_jsonl(tmp_path / "tasks.jsonl", tasks)
    assert task.read_jsonl(tmp_path / "tasks.jsonl") == tasks


def test_sorting_leaves_the_held_out_strings_out_of_training() -> None:
    held_out = sorting.held_out(200, seed=0)
    assert len(set(held_out)) == 200
    assert not set(held_out) & set(sorting.training(5000, seed=0, excluded=held_out))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("1234", 1.0),
        ("1243", 0.25),  # two of four places: 0.5 * 2 / 4
        ("123", 0.375),  # three of four: 0.5 * 3 / 4
        ("12344", 0.4),  # four right, but five written: 0.5 * 4 / 5
        ("", 0.0),
    ],
)
def test_sorting_is_scored_by_places_and_whole_answers(completion: str, expected: float) -> None:
    assert sorting.score("3142>", completion, {"answer": "1234"}) == expected
