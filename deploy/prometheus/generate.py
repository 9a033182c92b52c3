"""`python -m deploy.prometheus.generate`: writes rules.yml beside this file, from the learner's own table of alarms (learner/watch/alarms.py)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from learner.alarm_config import AlarmConfig
from learner.watch.alarms import ALARMS
from learner.watch.expressions import duration

FILE = Path(__file__).with_name("rules.yml")
HEAD = "# Made of learner/watch/alarms.py by python -m deploy.prometheus.generate; docs/operating.md has a section on each alarm.\n"
DOWN_S = 120.0  # times patience
PAGE = "docs/operating.md"


def rules(config: AlarmConfig) -> str:
    """The alert rules with a run's thresholds. One of them no learner can evaluate: whether services answer at all."""
    down: dict[str, Any] = {
        "alert": "HeadraceServiceDown", "expr": 'up{job="headrace"} == 0', "for": duration(DOWN_S * config.patience), "labels": {"severity": "critical"},
        "annotations": {"summary": "{{ $labels.run }}: {{ $labels.name }} answers no scrape", "page": page("HeadraceServiceDown")},
    }  # fmt: skip
    own = [
        {
            "alert": alarm.name, "expr": alarm.condition(config).promql(), **({"for": duration(alarm.hold_s * config.patience)} if alarm.hold_s else {}), "labels": {"severity": alarm.severity},
            "annotations": {"summary": f"{{{{ $labels.run }}}}: {alarm.template()}", "page": page(alarm.name)},
        }
        for alarm in ALARMS.values()
    ]  # fmt: skip
    return HEAD + yaml.safe_dump({"groups": [{"name": "headrace", "rules": [down, *own]}]}, sort_keys=False, width=1000)


def page(alarm: str) -> str:
    """Where its section is."""
    return f"{PAGE}#{alarm.lower()}"


if __name__ == "__main__":
    FILE.write_text(rules(AlarmConfig()))
    sys.stdout.write(f"{FILE}\n")
