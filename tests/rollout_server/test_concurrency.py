"""How many samples at once: each rule by numbers, and that it settles at what a KV cache bears."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rollout_server.concurrency import Load, Window, adjust


def load(**values: Any) -> Load:
    return Load(**{"num_running": 16, "num_waiting": 0, "kv_use": 0.5, "num_preempted": 0, "want": 1, **values})


AT_16: Any = {"limit": 16.0, "most": 128}
TABLE = [
    # all 16 places taken, no sign of too much, 8 ended: 16 + 8, and 16 + 8 / 2 once there was a sign
    ("steep", Window(**AT_16), load(num_ended=8), 24.0),
    ("additive", Window(**AT_16, steep=False), load(num_ended=8), 20.0),
    ("nothing has shown its size yet", Window(**AT_16), load(), 16.0),
    ("never over the most", Window(limit=120.0, most=128), load(num_running=120, num_ended=50), 128.0),
    # places are left, so that nothing is learnt; a group of 8 does not fit into the two left, so that they are taken
    ("unused", Window(**AT_16), load(num_running=10, num_ended=8), 16.0),
    ("room for less than a group", Window(**AT_16), load(num_running=14, num_ended=8, want=8), 24.0),
    ("nearly full", Window(**AT_16), load(kv_use=0.95, num_ended=8), 16.0),
    ("a short queue", Window(**AT_16), load(num_waiting=1, num_ended=8), 16.0),
    # a tenth less of what ran: 0.9 x 16, and of 12 where fewer ran than allowed; 2 of 16 are no trend, 3 are, but not where 4 ended
    ("a few preempted", Window(**AT_16), load(num_preempted=2), 16.0),
    ("preempted", Window(**AT_16), load(num_preempted=3), 14.4),
    ("as many as may be where four ended: a sign, so that the ascent is slow", Window(**AT_16), load(num_preempted=3, num_ended=4), 18.0),
    ("they add up", Window(**AT_16, preempted=2.0), load(num_preempted=1), 14.4),
    ("preempted with fewer running", Window(**AT_16), load(num_running=12, num_preempted=3), 10.8),
    ("preempted while more ran than allowed", Window(**AT_16), load(num_running=40, num_preempted=6), 14.4),
    # 16 given and 5 of them not drawn for want of KV: 11
    ("queue before a full cache", Window(**AT_16), load(num_waiting=5, kv_use=0.95), 11.0),
    ("at least one", Window(limit=1.0, most=8), load(num_running=1, num_preempted=2), 1.0),
    ("at least one though all wait", Window(limit=4.0, most=8), load(num_running=4, num_waiting=4, kv_use=1.0), 1.0),
    # the cut to 12 has not been worked off: preemptions of what still runs are no news
    ("a decrease takes effect first", Window(limit=12.0, most=128, steep=False, falling=True), load(num_preempted=4), 12.0),
    ("then the next preemption counts", Window(limit=12.0, most=128, steep=False, falling=True), load(num_running=12, num_preempted=2), 10.8),
    ("fixed", Window.fixed(16), load(num_preempted=9, kv_use=1.0, num_ended=9), 16.0),
]


@pytest.mark.parametrize(("window", "seen", "limit"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_each_rule_by_numbers(window: Window, seen: Load, limit: float) -> None:
    assert adjust(window, seen).limit == pytest.approx(limit)


def test_it_begins_with_half_or_a_group() -> None:
    assert Window.first(most=256, want=8).limit == 128
    assert Window.first(most=8, want=8).limit == 8
    assert Window.first(most=4, want=8).limit == 4


class Emulated:
    """A KV cache of `blocks`: a request holds one block more after each step, and ends after 1 to 2 x mean_steps of them. Where no block is free
    the newest gives its blocks back and waits until as many are free again."""

    def __init__(self, blocks: int, mean_steps: int) -> None:
        self.blocks, self.mean_steps, self.rng = blocks, mean_steps, random.Random(1)
        self.running: list[list[int]] = []  # [held, wanted]
        self.queue: list[list[int]] = []
        self.num_preempted = self.num_done = self.num_drawn = 0

    @property
    def free(self) -> int:
        return self.blocks - sum(held for held, _ in self.running)

    def step(self, limit: int) -> None:
        while len(self.running) + len(self.queue) < limit:
            self.queue.append([0, self.rng.randint(1, 2 * self.mean_steps)])
        num_new = 0
        while self.queue and self.free > self.queue[0][0] and num_new < 8:  # what is computed anew bounds a step
            self.running.append(self.queue.pop(0))
            self.running[-1][0] += 1
            num_new += 1
        for request in list(self.running):
            if any(request is other for other in self.running) and (self.free > 0 or self._preempts(request)):
                request[0] += 1
                self.num_drawn += 1
                if request[0] > request[1]:
                    self.running.remove(request)
                    self.num_done += 1

    def _preempts(self, request: list[int]) -> bool:
        """The newest gives way; whether that is another one."""
        self.num_preempted += 1
        self.queue.insert(0, self.running.pop())
        return self.queue[0] is not request


def steps(engine: Emulated, limit: int, count: int) -> Emulated:
    for _ in range(count):
        engine.step(limit)
    return engine


def test_it_settles_near_what_the_cache_bears_with_few_preemptions() -> None:
    # Lives of 1 to 40 steps, the length l being met in proportion to l: a request that runs holds 14 blocks on average, so 400 bear 28.
    engine, window, late = Emulated(400, 20), Window.first(most=256), (0, 0)
    for look in range(600):
        before, ended = engine.num_preempted, engine.num_done
        steps(engine, int(window.limit), 4)
        if look == 200:
            late = (engine.num_preempted, engine.num_done)
        window = adjust(window, Load(
            num_running=len(engine.running) + len(engine.queue), num_waiting=len(engine.queue), kv_use=1 - engine.free / 400,
            num_preempted=engine.num_preempted - before, num_ended=engine.num_done - ended,
        ))  # fmt: skip
    greedy = steps(Emulated(400, 20), 256, 2400)
    best = max(steps(Emulated(400, 20), fixed, 2400).num_drawn for fixed in (16, 24, 32, 48))
    per_request = (engine.num_preempted - late[0]) / (engine.num_done - late[1])
    print({"limit": window.limit, "drawn": engine.num_drawn, "best_fixed": best, "preempted_per_request": per_request, "all_at_once": greedy.num_preempted / greedy.num_done})
    assert 14 <= window.limit <= 40
    assert engine.num_drawn >= 0.85 * best
    assert per_request <= 0.3 and greedy.num_preempted / greedy.num_done > 2 * per_request
