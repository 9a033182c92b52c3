"""Every query of the Grafana dashboard asks for figures that are exported, and the file is what its script makes."""

from __future__ import annotations

import json
import re
from typing import Any

import promql_parser
import pytest

from deploy.grafana.generate import FILE, ROWS, text
from tests.deploy.test_metrics_page import FIGURES

EXPORTED = {figure.name: {*figure.labels, "run", "service", "name"} for figure in FIGURES}
PANELS: list[dict[str, Any]] = [panel for panel in json.loads(FILE.read_text())["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_is_exported(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        query = target["expr"]
        promql_parser.parse(query.replace("$__rate_interval", "1m"))
        names = set(re.findall(r"headrace_\w+", query))
        assert names and names <= EXPORTED.keys()
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) | {part.strip() for found in re.findall(r"by \(([^)]*)\)", query) for part in found.split(",")}
        assert all(labels <= EXPORTED[name] for name in names) or (" / " in query and labels <= set().union(*(EXPORTED[name] for name in names)))


def test_the_file_is_what_the_script_makes() -> None:
    assert FILE.read_text() == text(), "run python -m deploy.grafana.generate"


def test_no_panel_is_lost_and_each_legend_stands_for_one_query() -> None:
    assert [panel["title"] for panel in PANELS] == [panel.title for row in ROWS.values() for panel in row]
    assert [len(panel["targets"]) for panel in PANELS] == [len(panel.queries) for row in ROWS.values() for panel in row]
