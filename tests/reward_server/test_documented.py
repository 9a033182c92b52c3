"""docs/rewards.md says of every scorer what it is for, by an example that loads, where it is from, and what it cannot do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from reward_server.config import ScorerConfig
from reward_server.scorers import NAMES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()
OTHERS = ("Endpoints elsewhere", "Scores made of scores", "Whole groups", "A language model as a judge")


def section(title: str) -> str:
    """From its heading to the next one."""
    found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/rewards.md has no section {title!r}"
    return found.group(1)


@pytest.mark.parametrize("title", [*NAMES, *OTHERS])
def test_every_scorer_is_documented_with_an_example_that_loads_its_source_and_its_limits(title: str) -> None:
    text = section(title)
    assert re.search(r"\bSources?:", text), "where it is from"
    assert "Limits:" in text
    loaded = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    scorers = [each for block in loaded for each in (block["scorers"] if isinstance(block, dict) else block)]
    assert scorers and all(ScorerConfig.model_validate(each) for each in scorers)
    assert title in OTHERS or {each["use"] for each in scorers} == {title}
