"""The preset that learns a tool: its task, its run file, its result."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.demo import sums, tool
from deploy.schema import parse
from rollout_server.environments.calculator import Calculator
from rollout_server.environments.interface import Action, Task


def test_the_sample_done_right_earns_its_reward_from_the_calculator() -> None:
    pair = (37, 45)
    (prompt, _), (question, _), (result, _), (answer, _) = sums.turns(pair)
    game = Calculator(says="{}>", malformed="?>")
    assert game.reset(Task(prompt=sums.prompt(pair), fields={"answer": sums.answer(pair)}, seed=1)) == prompt == "37+45>"
    assert game.step(Action(text=question, turn=0)).observation == result == "82>"
    last = game.step(Action(text=answer, turn=1))
    assert last.done and last.reward == 1.0 and len(question) <= sums.LONGEST


def test_no_held_out_sum_is_trained_on() -> None:
    held_out = sums.held_out(200, seed=3)
    assert len(set(held_out)) == 200 and not set(held_out) & set(sums.training(4000, seed=3, excluded=held_out))


def test_the_run_file_is_a_whole_run_without_a_reward_server(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("train", "held-out"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "1+1>", "answer": "2"}) + "\n")
    run = parse(tool.run_content(tmp_path, tiny_model, 0, "grpo", "vllm"), where="run.yaml")
    assert run.reward is None and run.rollout.environments[0].use == "calculator" and run.learner.evaluation is not None
    longest = len(sums.prompt((99, 99))) + len("99+99=") + 1 + len("198>") + len("198") + 1
    assert longest <= len(sums.prompt((99, 99))) + tool.ROOM_TOKENS <= run.rollout.max_model_len


def test_the_result_is_the_curve_of_the_runs_evaluations(tmp_path: Path) -> None:
    def evaluation(step: int, score: float) -> dict[str, object]:
        return {"step": step, "version": step + 1, "lineage": 0, "evaluation": {"score": score, "standard_error": 0.02}}

    def line(step: int, turns: float) -> dict[str, object]:
        return {"step": step, "version": step + 1, "lineage": 0, "turns_mean": turns}

    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (evaluation(0, 0.15), line(1, 1.5), line(10, 2.0), evaluation(10, 0.6))))
    summary = tool.summarize(tmp_path, minutes=1.0)
    assert summary["curve"] == [[0, 0.15], [10, 0.6]] and (summary["accuracy_before"], summary["accuracy_after"]) == (0.15, 0.6)
    assert summary["turns_mean"] == [1.5, 2.0] and summary["steps"] == 10
