"""docs/metrics.md lists exactly what the three services export, as they run."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from learner.gateway import metrics as gateway_metrics
from protos.exporting import Figure
from reward_server import metrics as reward_metrics
from rollout_server import metrics as rollout_metrics
from rollout_server.config import RolloutConfig
from rollout_server.service import Service
from rollout_server.small_engine import SmallEngine
from tests.learner.gateway.gateway_harness import config_in, running
from tests.reward_server.service import serving

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"\| `(headrace_\w+)` \| (counter|gauge) \| ([\w, ]*) \| (.+) \|")
FIGURES: list[Figure[Any]] = [*gateway_metrics.FIGURES, *rollout_metrics.FIGURES, *reward_metrics.FIGURES]


def documented() -> dict[str, tuple[str, str, str]]:
    rows = [ROW.fullmatch(line) for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `headrace_")]
    assert all(rows), "a row of the table reads differently from the others"
    return {row[1]: (row[2], row[3], row[4]) for row in rows if row}


def exported(page: str) -> dict[str, tuple[str, str]]:
    """Name to kind and text, of headrace's own."""
    kinds = dict(re.findall(r"^# TYPE (headrace_\w+) (\w+)$", page, re.M))
    texts = dict(re.findall(r"^# HELP (headrace_\w+) (.+)$", page, re.M))
    return {name: (kinds[name], texts[name]) for name in kinds}


def get(port: int) -> str:
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read().decode()


def documented_of(*services: str) -> dict[str, tuple[str, str]]:
    return {name: (kind, text) for name, (kind, _, text) in documented().items() if name.split("_")[1] in services}


async def test_the_gateway_exports_what_is_documented_for_it_and_the_trainer(tmp_path: Path) -> None:
    config = config_in(tmp_path, metrics_address="127.0.0.1:0")
    config.run_dir.mkdir()
    (config.run_dir / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 0.25, "seconds": {"total": 2.0, "wait": 0.5}, "trained_tokens": 40, "mismatch_kl": None}) + "\n")
    async with running(config) as gateway:
        async with asyncio.timeout(20):
            while not gateway.exporter.port:
                await asyncio.sleep(0.01)
        page = await asyncio.to_thread(get, gateway.exporter.port)
    assert exported(page) == documented_of("gateway", "trainer")
    lines = page.splitlines()
    assert "headrace_trainer_loss 0.25" in lines and 'headrace_trainer_step_seconds{piece="wait"} 0.5' in lines
    assert 'headrace_trainer_tokens_total{side="trained"} 40.0' in lines and "headrace_trainer_steps_total 1.0" in lines
    assert not [line for line in lines if line.startswith("headrace_trainer_kl_nats ")]  # null in the line: nothing to tell
    assert "headrace_gateway_max_open_groups 4.0" in lines  # (1 + 1) · 2 − 0


async def test_a_rollout_server_exports_what_is_documented_for_it(tiny_model: Path) -> None:
    config = RolloutConfig(model=str(tiny_model), engine="small", max_model_len=256, metrics_address="127.0.0.1:0")
    service = Service(config, tiny_model, SmallEngine(config, tiny_model))
    task = asyncio.create_task(service.serve())
    async with asyncio.timeout(40):
        while not service.replica.life:
            await asyncio.sleep(0.01)
        page = await asyncio.to_thread(get, service.exporter.port)
        service.stop()
        await task
    assert exported(page) == documented_of("rollout")
    assert 'headrace_rollout_state{state="serving"} 1.0' in page and 'headrace_rollout_requests_total{end="length"} 0.0' in page


def test_a_reward_server_exports_what_is_documented_for_it(tmp_path: Path) -> None:
    from deploy.services import free_addresses

    metrics = free_addresses(1)[0]
    with serving(tmp_path, {"scorers": [{"name": "answer", "use": "exact"}, {"name": "far", "http": {"urls": ["http://127.0.0.1:9/score"]}}], "metrics_address": metrics}):
        page = get(int(metrics.rpartition(":")[2]))
    assert exported(page) == documented_of("reward")
    assert 'headrace_reward_answers_total{outcome="scored",scorer="answer"} 0.0' in page or 'headrace_reward_answers_total{scorer="answer",outcome="scored"} 0.0' in page
    assert 'headrace_reward_breaker_ratio{scorer="far",upstream="http://127.0.0.1:9/score"} 0.0' in page


def test_labels_are_documented() -> None:
    assert {figure.name: ", ".join(figure.labels) for figure in FIGURES} == {name: labels for name, (_, labels, _) in documented().items()}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_names_follow_the_scheme(figure: Figure[Any]) -> None:
    name, kind = figure.name, figure.kind
    assert re.fullmatch(r"headrace_(gateway|trainer|rollout|reward)_[a-z0-9]+(_[a-z0-9]+)*", name)
    assert name.endswith("_total") == (kind == "counter")
