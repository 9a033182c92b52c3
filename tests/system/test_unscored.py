"""What becomes of samples that a scorer had no answer for, end to end: each policy, counted in the status and shown in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.report import write
from deploy.status import lines
from tests.system.harness import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("policy", "in_status", "in_report"),
    [
        ({"unscored": "drop_sample"}, "unscored_error ", "unscored_error"),
        ({"unscored": "drop_group"}, "dropped: unscored ", "unscored"),
        ({"unscored": "fallback", "unscored_value": -1.0}, "unscored_error_fallback ", "unscored_error"),
    ],
    ids=["drop_sample", "drop_group", "fallback"],
)
def test_samples_that_a_scorer_failed_on_are_dealt_with_as_told_and_counted(policy: dict[str, Any], in_status: str, in_report: str, tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward("tests.system.scorers:sometimes")
        run.start_learner(filter={"min_usable": 2, **policy})
        run.start_rollout("only")
        steps = run.wait_steps(4)
        status = run.status()
        assert status is not None
        told = "\n".join(lines(status))
        assert in_status in told, told
        page = write(run.run_dir).read_text()
        assert in_report in page
        for key, of in (("fallbacks", "fallback"), ("unusable", "drop_sample")):
            assert any("unscored_error" in line[key] for line in steps) == (policy["unscored"] == of), (key, steps)
