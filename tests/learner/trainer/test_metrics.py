"""What a step's line says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.trainer.checkpoint import SaveReport
from learner.trainer.decode import Batch, decode_stats
from learner.trainer.metrics import mismatch_of, summary_of_batch, summary_of_result
from learner.trainer.publish import Published
from learner.trainer.record import Recorder
from learner.trainer.table import Entry
from learner.trainer.tally import StepResult
from learner.weights.plan import make_plan
from learner.weights.push import PushMetrics
from learner.weights.snapshot import Snapshot
from protos.learner.v1alpha1 import feed_pb2

NOTHING = StepResult(updates=(), num_without_signal=1, loss=0.0, sums={}, log_ratio=torch.zeros(0))


def batch(*table: Entry) -> Batch:
    stats = feed_pb2.FeedStats(num_dropped={"unusable": 2}, num_leased=9, num_trained=6, num_open=1, tokens_by_staleness={0: 3, 1: 11})
    return Batch(policy_step=3, table=table, samples=(), stats=decode_stats(stats))


def entry(index: int, **changes: object) -> Entry:
    made = Entry(
        group_id="g", sample_index=index, reward=float(index), usable=True, num_prompt_tokens=3, num_completion_tokens=4, num_trained_tokens=4,
        staleness=1, owner=0, truncated=False, num_versions=1, reward_parts={"format": 0.5},
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def test_lengths_are_measured_before_masking() -> None:
    # faults.md 78: lengths 10 (truncated and masked) and 4: mean 7, min 4, max 10, half of them truncated
    summary = summary_of_batch(batch(entry(0, num_completion_tokens=10, num_trained_tokens=0, truncated=True), entry(1)))
    names = ("completion_tokens_mean", "completion_tokens_min", "completion_tokens_max", "truncated_share", "trained_tokens")
    assert [summary[name] for name in names] == [7.0, 4, 10, 0.5, 4]


def test_rewards_are_those_of_usable_samples_and_the_rest_is_named() -> None:
    fell_back = entry(3, reward=2.0, reward_parts={"unscored_error": 1.0})
    assert summary_of_batch(batch(entry(0), fell_back))["fallbacks"] == {"unscored_error": 1}
    table = (entry(0), entry(1), entry(2, usable=False, unusable_reason="unscored", reward=float("nan"), num_versions=2))
    summary = summary_of_batch(batch(*table))
    assert (summary["reward_mean"], summary["reward_std"], summary["reward_parts"]) == (0.5, 0.5, {"format": 0.5})
    assert summary["unusable"] == {"unscored": 1} and summary["mixed_version_samples"] == 1
    assert summary["staleness"] == {"0": 3, "1": 11} and summary["dropped"] == {"unusable": 2} and summary["groups"] == ["g"]


def test_each_named_data_set_has_its_own_numbers() -> None:
    table = (entry(0, data_set="math"), entry(1, data_set="math", truncated=True), entry(0, group_id="h", data_set="code", reward=3.0), entry(1, group_id="h", data_set="code", usable=False, unusable_reason="unscored"))
    sets = summary_of_batch(batch(*table))["data_sets"]
    assert sets["math"] == {"num_groups": 1, "reward_mean": 0.5, "trained_tokens": 8, "truncated_share": 0.5, "zero_signal_share": 0.0}
    assert sets["code"] == {"num_groups": 1, "reward_mean": 3.0, "trained_tokens": 4, "truncated_share": 0.0, "zero_signal_share": 1.0}
    assert "data_sets" not in summary_of_batch(batch(entry(0)))


def test_a_step_without_signal_says_so() -> None:
    summary = summary_of_result(NOTHING, clip_low=0.2, clip_high=0.28)
    assert summary["no_signal"] and summary["num_updates"] == 0 and summary["loss"] == 0.0


@pytest.mark.parametrize("active", [True, False])
def test_a_line_is_json_whatever_the_numbers(active: bool, tmp_path: Path) -> None:
    snapshot = Snapshot(folder=tmp_path, policy_step=4, rank=0, num_bytes=0, total_bytes=0, seconds=0.0, plan=make_plan((), (), bucket_bytes=1024))
    published = Published(version=5, lineage=0, policy_step=4, snapshot=snapshot)
    recorder = Recorder(tmp_path, active=active, clip=(0.2, 0.28))
    recorder.step(batch(entry(0)), replace(NOTHING, loss=float("nan")), published, SaveReport(), PushMetrics(), {"wait": 1.0, "total": 4.0})
    if not active:
        assert not (tmp_path / "metrics.jsonl").exists()
        return
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["loss"] is None and line["trainer_idle_share"] == 0.25 and line["trained_tokens_per_s"] == 1.0


def test_the_mismatch_that_the_bound_follows_is_that_of_the_line() -> None:
    result = replace(NOTHING, log_ratio=torch.tensor([0.1, -0.3, 0.0]))
    found = {name: mismatch_of(result, name, clip_low=0.2, clip_high=0.28) for name in ("abs_max", "kl_k3", "beyond_clip_share")}
    # e^-.3 = .741 is outside .8 to 1.28, the others are inside
    assert found["abs_max"] == pytest.approx(0.3) and found["beyond_clip_share"] == pytest.approx(1 / 3)
    assert found["kl_k3"] == summary_of_result(result, clip_low=0.2, clip_high=0.28)["mismatch_kl"]
    assert mismatch_of(NOTHING, "kl_k3", clip_low=0.2, clip_high=0.28) is None
