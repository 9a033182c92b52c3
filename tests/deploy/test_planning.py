"""`headrace plan`: the arithmetic, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from deploy.cluster.fits import job_of
from deploy.planning import Job, lines, sample_s, splits, train_s
from deploy.schema import load
from tests.templates import FOLDER


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Stage 1: 128 groups of 8, 512 prompt tokens and 1024 new ones each, 4.02 B weights, H100."""
    monkeypatch.chdir(FOLDER.parents[1])
    return job_of(load(FOLDER / "stage-1-one-machine.yaml"), "x", length_share=0.5, mfu=0.4)


def test_training_is_bound_by_arithmetic(job: Job) -> None:
    # 1024 samples of 1024 new tokens and an eighth of a prompt of 512 (shared in its group); 6 operations a weight and token and 2 for recomputation
    operations = 1024 * (1024 + 512 / 8) * 8 * 4.02e9
    assert train_s(job, 4) == pytest.approx(operations / (4 * 989e12 * 0.4))
    assert train_s(job, 8) == pytest.approx(train_s(job, 4) / 2)


def test_sampling_is_bound_by_memory(job: Job) -> None:
    # 256 samples at once: each step reads 2 B x 4.02e9 and the cache of 256 x (512 + 1024 / 2) tokens of 2 * 36 * 8 * 128 * 2 B, at 0.6 x 3.35 TB/s
    step_s = (2 * 4.02e9 + 256 * 1024 * 147_456) / (3.35e12 * 0.6)
    assert sample_s(job, 4) == pytest.approx(1024 * 1024 / (4 * 256 / step_s))


def test_engines_and_pipeline_stages_share_the_reading(job: Job) -> None:
    # Two engines of two stages: 4 x 2 engines with 128 samples each, whose weights and cache are read by two GPUs
    step_s = (2 * 4.02e9 + 128 * 1024 * 147_456) / (2 * 3.35e12 * 0.6)
    engines = replace(job, rollout=job.rollout.model_copy(update={"pipeline_parallel": 2, "engines": 2}))
    assert sample_s(engines, 4) == pytest.approx(1024 * 1024 / (8 * 128 / step_s))
    assert next((split.ranks, split.replicas) for split in splits(engines, 6)) == (2, 1)  # four GPUs a replica


def test_the_best_division_is_the_one_where_both_sides_take_about_as_long(job: Job) -> None:
    best = splits(job, 8)[0]
    assert (best.ranks, best.replicas) == (4, 4)
    assert all(split.step_s >= best.step_s for split in splits(job, 8))
    # one rank: 16 B x 4.02e9 (60 GiB), two gathered layers, activations, buckets and CUDA: 68 GiB
    assert 1 in [split.ranks for split in splits(job, 8)] and 1 not in [split.ranks for split in splits(replace(job, gpu_gib=64.0), 8)]


def test_the_words_say_that_it_is_an_estimate(job: Job) -> None:
    said = list(lines(job, 4, 4))
    assert said[0].startswith("an estimate from first principles, not a measurement") and "best division" in said[-1]


def test_a_file_that_does_not_say_enough_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    result = CliRunner().invoke(app, ["plan", str(FOLDER / "cpu.yaml")])
    assert result.exit_code == 2 and "actor and rollout need GPU groups" in result.output
    file = tmp_path / "run.yaml"
    text = (FOLDER / "stage-1-one-machine.yaml").read_text()
    file.write_text(text.replace("model_sizes:\n  Qwen/Qwen3-4B: {parameters_b: 4.02, layers: 36, hidden: 2560, heads: 32, kv_heads: 8, head_width: 128, vocab: 151936}\n", ""))
    result = CliRunner().invoke(app, ["plan", str(file)])
    assert result.exit_code == 2 and "model_sizes: nothing is known of Qwen/Qwen3-4B" in result.output
