"""The benchmark of the rollout service runs to its end on a tiny model, all sides real, and checks what it timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._rollout_models import prompts
from benchmarks.rollout_tax import Case, bars_of, requests_of
from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_all_sides_answer_the_same_content_and_ratios_come_of_interleaved_pairs(tmp_path: Path) -> None:
    command = ["benchmarks.rollout_tax", "--json", "--model", "tiny", "--concurrent", "4", "--tokens", "8", "--pairs", "2", "--logs", str(tmp_path), "--out", str(tmp_path / "partial.json")]
    ran = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=450)
    logs = "".join(f"\n--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in tmp_path.glob("*.log"))
    assert ran.returncode == 0, ran.stderr[-3000:] + logs
    line = json.loads(ran.stdout.splitlines()[-1])
    assert [bar["name"] for bar in line["bars"]] == ["vs_engine_logprobs"] and not line["passed"]  # two pairs are no result
    assert "http_failed" not in json.loads((tmp_path / "partial.json").read_text()), logs
    compared = line["notes"]["against_transformers"]
    assert {"4-stream", "4-whole", "4-logprobs", "4-bare"} < set(compared) and compared["4-stream"]["samples"] == 8
    assert all(one["mean"] < 1e-3 for way, one in compared.items() if not way.endswith("bare"))


def test_lengths_are_spread_about_their_mean_and_the_same_for_every_side() -> None:
    case = Case(model="3m", concurrent=16, tokens=32)
    requests = requests_of(case, 2048, seed=1)
    lengths = [new for _, new in requests]
    assert len(requests) == 32 and min(lengths) >= 16 and max(lengths) <= 48 and 28 < sum(lengths) / 32 < 36
    assert requests == requests_of(case, 2048, seed=1) != requests_of(case, 2048, seed=2)
    assert [prompt for prompt, _ in requests] == prompts(2048, 32, 64, seed=1)


def test_the_faster_of_http_s_two_ways_counts() -> None:
    case = Case(model="0.5b", concurrent=512, tokens=64)
    pairs = [{"stream": 40.0, "logprobs": 20.0, "bare": 40.0, "completions": 10.0}, {"stream": 44.0, "logprobs": 20.0, "bare": 40.0, "completions": 10.0}]
    bars = {bar.name: (bar.value, bar.bar) for bar in bars_of(case, pairs, device="cuda", many=True)}
    assert bars == {"vs_engine_logprobs_512": (2.1, 0.95), "vs_engine_bare_512": (1.05, 0.85), "vs_http_512": (4.2, 1.1)}
