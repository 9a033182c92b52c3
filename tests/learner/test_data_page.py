"""Every example of docs/data.md is a learner section that loads, and means what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.config import LearnerConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
EXAMPLES: list[dict[str, Any]] = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)]


def loaded(example: dict[str, Any]) -> LearnerConfig:
    return LearnerConfig.model_validate({"run_dir": "runs/x", "model": "models/x", **example})


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_loads_and_its_resolved_form_loads_again(example: dict[str, Any]) -> None:
    made = loaded(example)
    assert LearnerConfig.model_validate_json(made.model_dump_json()) == made


def test_the_page_has_an_example_of_each_part() -> None:
    text = str([loaded(example).model_dump() for example in EXAMPLES])
    assert len(EXAMPLES) == 8 and all(word in text for word in ("'hub'", "'band'", "'sorted'", "'requeue': ('attempts'", "'max_flat_a_step': 128", "'buffer_tokens': 1024", "'rloo'"))


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"max_flat_a_step": 4}, "filter.max_flat_a_step=4 without zero_signal"),
        ({"zero_signal": True, "max_flat_a_step": 256}, "max_flat_a_step=256 is not under max_consecutive_drops=256"),
    ],
)
def test_a_bound_that_could_have_no_effect_is_refused(filters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loaded({"data": {"prompts": "x.jsonl"}, "filter": filters})
