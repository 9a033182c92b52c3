"""Clocks that are set, and files that cannot be written, do not disturb a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from learner.gateway.clock import LeaseClock, RunClock


def test_a_clock_that_is_set_while_the_gateway_runs_ends_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LeaseClock(latest_lapse=None, lapse_s=600)
    before = clock.now_s()
    monkeypatch.setattr(time, "time", lambda: before + 3600)
    assert clock.now_s() - before < 5


def test_after_a_restart_under_a_clock_set_back_a_lease_lives_no_longer_than_lapse_s() -> None:
    """Lent until 1000 s from now with lapse_s 600: the clock of then was 400 s ahead."""
    now = time.time()
    clock = LeaseClock(latest_lapse=now + 1000, lapse_s=600)
    assert 399 < clock.now_s() - now < 405


def test_a_lease_of_the_past_does_not_hold_the_clock_back() -> None:
    now = time.time()
    assert abs(LeaseClock(latest_lapse=now - 1000, lapse_s=600).now_s() - now) < 5


def test_the_runs_time_is_read_again_and_a_file_that_cannot_be_written_or_read_costs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "active_s"
    path.write_text("90.5")
    clock = RunClock(path)
    assert 90.5 <= clock.active_s < 150
    clock.save()
    assert float(path.read_text()) >= 90.5
    path.write_text("")
    assert RunClock(path).active_s < 60
    RunClock(tmp_path / "nowhere" / "active_s").save()
