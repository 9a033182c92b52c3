"""The report of whole, partial and empty runs; steps in the surviving lineage; plots as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.mistakes import Mistakes
from deploy.plot import Series, bar_chart, line_chart, number
from deploy.progress import evaluations, surviving, words
from deploy.report import CHARTS, chart, write
from protos.appended import whole_lines


def line(step: int, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl as the learner writes it."""
    return {
        "step": step, "version": step + 1, "lineage": 0, "time_s": 1000.0 + 30 * step, "reward_mean": 0.1 * step, "reward_std": 0.3, "loss": -0.01,
        "grad_norm": 1.5, "staleness": {"0": 30, "1": 10}, "staleness_max": 1, "trainer_idle_share": 0.25, "replica_idle_share": 0.1,
        "generated_tokens_per_s": 300.0, "trained_tokens_per_s": 120.0, "seconds": {"total": 10.0, "wait": 2.5, "train": 7.0, "snapshot": 0.2, "push": 0.4},
        "mismatch_kl": 1e-4, "clip_fraction_high": 0.01, "clip_fraction_low": 0.02, "clip_fraction_dual": 0.0, "entropy_estimate": 0.9, "lr": 5e-6,
        "completion_tokens_mean": 9.0, "completion_tokens_max": 12, "open_groups": 16, "waiting_groups": 2, "num_replicas": 1,
        "leased_groups": 40, "trained_groups": 24, "dropped": {"zero_signal": 7}, **more,
    }


def run_folder(folder: Path, lines: list[dict[str, Any]]) -> Path:
    (folder / "resolved").mkdir(parents=True)
    (folder / "resolved" / "learner.json").write_text('{"steps": 3}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def test_a_whole_run_gets_every_chart_and_needs_no_other_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [line(1), line(2, unusable={"unscored_timeout": 3}), line(3, fallbacks={"unscored_error": 2})])
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "group_id": "g1", "sample_index": 0, "text": "<b>6 + 5</b> = 11", "reward": 1.0, "versions": [1]}) + "\n")
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "before.jsonl").write_text('{"score": 0.0}\n{"score": 1.0}\n')
    text = write(folder).read_text()
    assert "unscored_timeout" in text and "by reason" in text
    assert "unscored_error" in text and "filter.unscored_value" in text
    for each in CHARTS:
        assert f'aria-label="{each.title}"' in text
    assert "Trained tokens by staleness" in text and "zero_signal" in text and "Held-out accuracy" in text
    assert "&lt;b&gt;6 + 5&lt;/b&gt; = 11" in text
    assert "http://" not in text and "https://" not in text and "<script" not in text


def test_a_run_without_a_step_gets_a_page_that_says_so(tmp_path: Path) -> None:
    assert "No step has been made yet" in write(run_folder(tmp_path / "run", [])).read_text()


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [line(1), line(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ver')
    assert "<td class=\"\">steps</td><td class=\"\">2</td>" in write(folder).read_text()
    assert [json.loads(each)["step"] for each, _ in whole_lines(folder / "metrics.jsonl", 0)] == [1, 2]


def test_lines_without_some_metrics_still_make_a_page(tmp_path: Path) -> None:
    assert 'aria-label="Reward"' in write(run_folder(tmp_path / "run", [{"step": 1, "version": 2, "reward_mean": 0.5, "loss": None}])).read_text()


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, make: bool) -> None:
    folder = tmp_path / "other"
    if make:
        folder.mkdir()
    with pytest.raises(Mistakes, match=f"{folder}: "):
        write(folder)


def test_steps_made_again_after_a_rollback_count_once_the_last_time() -> None:
    lines = [line(1), line(2), line(3), line(2, version=9), line(3, version=10)]
    assert [(each["step"], each["version"]) for each in surviving(lines)] == [(1, 2), (2, 9), (3, 10)]


def test_steps_of_a_lineage_that_was_left_do_not_count_though_they_were_not_made_again() -> None:
    """A run that was cut at step 1, had made 4, and ended at 3."""
    lines = [line(1), evaluated(1, 0.25), line(2), line(3), evaluated(3, 0.5), line(4, version=5), line(2, version=9), line(3, version=10)]
    assert [(each["step"], each["version"]) for each in surviving(lines)] == [(1, 2), (2, 9), (3, 10)]
    assert [each["step"] for each in evaluations(lines)] == [1]  # what was said of the other step 3 is not of this one


def test_a_step_in_words_has_the_numbers_people_watch() -> None:
    text = words(line(2), 50)
    for part in ("step   2/50", "reward 0.200", "0:75% 1:25%", "300 tok/s drawn, 120 trained", "learner 25%, replicas 10%", "40 leased, 7 dropped"):
        assert part in text


def evaluated(step: int, score: float | None, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl as the gateway writes it."""
    greedy = None if score is None else {"mean": score, "standard_error": 0.125, "num_prompts": 4}
    found = {
        "score": score, "standard_error": score and 0.125, "greedy": greedy, "ended": "complete", "num_prompts": 4, "wanted": 4, "leased": 4, "scored": 4, "unscored": 0,
        "lost": 0, "tokens_by_version": {"3": 16, "4": 2},
    }  # fmt: skip
    return {"step": step, "version": step + 1, "lineage": 0, "time_s": 1000.0, "evaluation": {**found, **more}}


def test_evaluations_are_no_steps_and_have_their_figure_and_their_words(tmp_path: Path) -> None:
    lines = [line(1), evaluated(0, 0.25), line(2), evaluated(2, 0.5), line(3), evaluated(2, 0.75), evaluated(3, None)]
    assert [each["step"] for each in surviving(lines)] == [1, 2, 3]
    assert [(each["step"], each["evaluation"]["score"]) for each in evaluations(lines)] == [(0, 0.25), (2, 0.75), (3, None)]
    assert words(lines[1], 3) == "evaluation of step 0 (version 1): greedy 0.250 ± 0.125 (4 prompts)"
    text = write(run_folder(tmp_path / "run", lines)).read_text()
    for part in ('aria-label="Held-out score"', "greedy 0.750 ± 0.125", "3: 16, 4: 2", "one standard error above", "no score"):
        assert part in text


def test_a_chart_leaves_out_steps_without_a_value() -> None:
    loss = next(each for each in CHARTS if each.title == "Loss")
    assert chart(loss, [line(1, loss=None)]) == ""


def test_a_line_runs_from_the_left_edge_to_the_right() -> None:
    figure = line_chart("t", [Series(name="a", points=((1.0, 5.0), (2.0, 15.0)))])
    # x 1..2 on 52..410; y: 5..15 with a margin of 0.5 below (or 0) and above: low 5 - 0.5 = 4.5 is above 4 * 0.5, so kept; high 15.5
    # pixel of 5: 174 + (5 - 4.5) / 11 * (12 - 174) = 166.6; of 15: 174 + 10.5 / 11 * -162 = 19.4
    assert 'points="52.0,166.6 410.0,19.4"' in figure


def test_a_bars_height_is_its_share_of_the_highest() -> None:
    figure = bar_chart("t", [("a", 1.0), ("b", 4.0)])
    assert 'height="40.5"' in figure and 'height="162.0"' in figure  # 162 pixels for 4, a quarter of them for 1


@pytest.mark.parametrize(("value", "text"), [(3.0, "3"), (0.25, "0.25"), (1234567.0, "1.23e+06"), (12345.0, "12345")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_groups_are_counted_after_the_last_step_as_the_audit_does(tmp_path: Path) -> None:
    """The line of a step is written when its batch is taken: of 40 leased, 24 trained, 7 dropped, 9 open, the 4 of this batch are trained by its end."""
    page = write(run_folder(tmp_path / "run", [line(1, groups=["g1", "g2", "g3", "g4"], open_groups=9)])).read_text()
    assert "40, 28, 7, 5" in page
