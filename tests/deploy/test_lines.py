"""A mistake names the line of the file that it is about."""

from __future__ import annotations

import pytest

from deploy.lines import lines_of, located

TEXT = """\
run_dir: runs/x
learner:
  steps: 0
  sampling: {temperature: 0}
reward:
  scorers:
    - name: a
      use: exakt
"""


@pytest.mark.parametrize(
    ("message", "number"),
    [
        ("learner.steps: Input should be greater", 3),
        ("learner: sampling.temperature=0 with group_size=8: greedy samples", 4),  # said in two parts
        ("reward.scorers.0.use: 'exakt' is no built-in scorer", 8),
        ("learner.trainer.served_dtype=float32 differs from rollout.dtype=bfloat16", 2),  # not in the file: the section around it
        ("run_dir=runs/x: 100 MiB are free", 1),
    ],
)
def test_the_line_is_that_of_the_key_or_of_what_is_around_it(message: str, number: int) -> None:
    assert located(f"run.yaml: {message}", "run.yaml", lines_of(TEXT)) == f"run.yaml:{number}: {message}"


@pytest.mark.parametrize("line", ["run.yaml: rollout.dtype=x: what the file does not hold", "another.yaml: learner.steps: 1", "run.yaml: 12 is wrong"])
def test_a_line_without_a_place_stays_as_it_is(line: str) -> None:
    assert located(line, "run.yaml", lines_of(TEXT)) == line


def test_a_text_that_is_no_yaml_has_no_lines() -> None:
    assert lines_of("a: [") == {}
