"""The two worked examples, by hand."""

from __future__ import annotations

import pytest

from rollout_server.environments.calculator import Calculator, calculate
from rollout_server.environments.interface import Action, Step, Task
from rollout_server.environments.tower_of_hanoi import TowerOfHanoi


def say(text: str, turn: int = 0) -> Action:
    return Action(text=text, turn=turn)


def test_the_calculator_is_asked_and_then_answered() -> None:
    game = Calculator(tool_reward=0.1)
    assert game.reset(Task(prompt="37*21", fields={"answer": 777}, seed=1)) == "37*21"
    assert game.step(say("37*21=")) == Step(observation="777", reward=0.1)
    assert game.step(say("37*21+=")) == Step(observation="error")
    assert game.step(say(" 777 ")) == Step(reward=1.0, done=True, parts={"asked": 1.0})
    other = Calculator()
    other.reset(Task(prompt="37*21", fields={"answer": "777"}, seed=1))
    assert other.step(say("778")) == Step(reward=0.0, done=True, parts={"asked": 0.0})
    with pytest.raises(ValueError, match="no field `answer`, only \\['gold'\\]"):
        Calculator().reset(Task(prompt="1", fields={"gold": "1"}, seed=1))


def test_the_calculator_reads_numbers_and_nothing_else() -> None:
    assert calculate("3*(4+5)") == 27 and calculate("-2-3") == -5
    for bad in ("", "2**9", "1/2", "a", "__import__('os')", "1.5", "True", "9" * 70, "999999999999999999*10", "(1", "1,2", "[1]"):
        with pytest.raises(ValueError):
            calculate(bad)


def test_a_game_of_hanoi_is_played_to_its_end() -> None:
    # two disks from one peg to another: the small one to the third peg, the large one to the target, the small one upon it
    game = TowerOfHanoi(num_disks=2)
    said = game.reset(Task(prompt="play", fields={}, seed=5))
    about = game._entry["metadata"]
    start, target = about["start_peg"], about["target_peg"]
    (third,) = {1, 2, 3} - {start, target}
    assert f"from peg {start} to peg {target}" in said and f"{start}: 2 1" in said
    assert game.step(say(f"{start}>{third}")).observation == game.shown() and f"{third}: 1" in game.shown()
    forbidden = game.step(say(f"I move {start} to {third}"))
    assert str(forbidden.observation).startswith(f"Disk 2 is larger than what lies on peg {third}. ") and not forbidden.done
    assert str(game.step(say("hm")).observation).startswith("No move was seen. ")
    game.step(say(f"{start}>{target}"))
    last = game.step(say(f"{third}>{target}"))
    assert last.done and last.reward == 1.0 and last.parts == {"solved": 1.0}  # reasoning-gym's own judgement of the moves


def test_a_game_of_hanoi_ends_without_being_solved() -> None:
    game = TowerOfHanoi(num_disks=2, max_moves=1)
    game.reset(Task(prompt="play", fields={}, seed=5))
    assert game.step(say("nothing")) == Step(reward=0.0, done=True, parts={"solved": 0.0})
