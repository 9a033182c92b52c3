"""What is counted for the figures alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.gateway.counters import PushCounters, StepClock
from learner.gateway.last_step import LastStep


def test_pushes_and_loads_add_up() -> None:
    pushes = PushCounters()
    ranks = [{"rank": 0, "ok": True, "seconds": 0.5, "bytes_rooted": 10}, {"rank": 1, "ok": False}]
    pushes.epoch({"ranks": ranks, "members": [{"phase": "received"}, {"phase": "failed"}]})
    pushes.epoch({"ranks": [], "members": [{"phase": "received"}]})
    pushes.load({"transfer_s": 0.25, "pause_s": 0.5, "pieces_s": {"pause": 0.125, "apply": 0.375}})
    pushes.load({"transfer_s": 0.25, "pause_s": 0.5, "pieces_s": {}})
    assert (pushes.num_epochs, pushes.seconds, pushes.num_bytes, dict(pushes.outcomes)) == (2, 0.5, 10, {"received": 2, "failed": 1})
    assert (pushes.num_loads, pushes.transfer_s, pushes.pieces_s) == (2, 0.5, {"pause": 0.625, "apply": 0.375})


def test_steps_of_low_use_are_counted_in_a_row() -> None:
    clock, seen = StepClock(), []
    for uses in ([[0.2, 0.4]], [[0.9], [0.2]], [], [[0.1]], [[0.1]], [[0.1]]):  # means 0.3, 0.55, as before, 0.1, ...
        for use in uses:
            clock.sample(use)
        clock.closed()
        seen.append((pytest.approx(clock.use), clock.num_low))
    assert seen == [(0.3, 1), (0.55, 0), (0.55, 0), (0.1, 1), (0.1, 2), (0.1, 3)]


def test_only_what_was_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    last = LastStep(path)
    assert last.read() == {}
    path.write_text(json.dumps({"step": 1, "seconds": {"total": 2.0}, "trained_tokens": 5}) + "\n" + '{"step": 2, "sec')
    assert last.read()["step"] == 1 and last.num_steps == 1
    with path.open("a") as file:
        file.write('onds": {"total": 1.0}, "trained_tokens": 7}\n' + json.dumps({"step": 2, "evaluation": {}}) + "\n")
    assert last.read()["step"] == 2 and (last.num_steps, last.seconds["total"], last.num_tokens["trained"]) == (2, 3.0, 12)
    assert last.read()["step"] == 2 and last.num_steps == 2
    path.write_text(json.dumps({"step": 1}) + "\n")  # another file in its place
    assert last.read()["step"] == 1
