"""How well generation and training overlap under the staleness bound: `python -m benchmarks.overlap --json`.

Virtual time: the ledger, its window and its versions are the gateway's own code, called at the times that an emulated engine and trainer
make. The engine has `slots` places and draws a token in each a second; lengths are log-normal with p99 = 8 × median. Training a batch takes
as long as drawing one takes a full engine, the case in which overlap is worth most and waiting costs most. A new version is loaded
after 2 % of that.

of_bound      the time that the busier side needs alone, over the time taken
vs_sync       against drawing a batch, training it, loading the version, in turns
vs_one_step   against drawing the next batch, whole, while one is trained (one step off policy)

Every scheme draws samples of the same lengths; a pair is one seed. No token trained may be older than S steps: checked here from what the
engine did, besides the ledger's own check.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from benchmarks import _line
from benchmarks._line import Bar, Pair
from learner.gateway.groups import SampleFacts
from learner.gateway.ledger import Ledger
from learner.gateway.terms import Limits

P, G = 32, 8
MEDIAN_TOKENS = 256
SIGMA = math.log(8) / 2.3263  # the 99th percentile lies 2.3263 deviations above the median
LOAD_SHARE = 0.02  # of a step, from publication until the engine draws from the version
WARM_STEPS, STEPS = 10, 50
SHARE_OF_PG = {"PG/16": 16, "PG/8": 8, "PG/4": 4, "PG/2": 2}


def mean_tokens() -> float:
    return MEDIAN_TOKENS * math.exp(SIGMA**2 / 2)


class Lengths:
    """Tokens of each sample, the same for every scheme of a seed."""

    def __init__(self, seed: int, num_groups: int) -> None:
        drawn = np.random.default_rng(seed).lognormal(math.log(MEDIAN_TOKENS), SIGMA, (num_groups, G))
        self._tokens: list[list[int]] = np.maximum(1, np.rint(drawn)).astype(int).tolist()

    def of(self, seq: int) -> list[int]:
        return self._tokens[seq]

    def bound_s(self, slots: int, train_s: float) -> float:
        """Seconds of a step that neither side can go below."""
        trained = [sum(tokens) for tokens in self._tokens[WARM_STEPS * P : STEPS * P]]
        return max(train_s, P * statistics.fmean(trained) / slots)


@dataclass(order=True, slots=True)
class Event:
    """What happens next: the engine ends a sample, the trainer ends a step, or a version is loaded."""

    at_s: float
    kind: str
    seq: int = 0
    index: int = 0


@dataclass(slots=True)
class Engine:
    """Places, what waits for one, and the versions it has drawn from: (since, version)."""

    free: int
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    loaded: list[tuple[float, int]] = field(default_factory=list)
    started: dict[tuple[int, int], float] = field(default_factory=dict)

    def spans(self, began_s: float, tokens: int) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of a sample that took a second a token."""
        spans: list[tuple[int, int]] = []
        done = 0
        for position, (_, version) in enumerate(self.loaded):
            until_s = self.loaded[position + 1][0] if position + 1 < len(self.loaded) else math.inf
            end = min(tokens, math.ceil(until_s - began_s)) if until_s < math.inf else tokens
            if until_s > began_s and end > done:
                spans.append((version, end - done))
                done = end
        return tuple(spans)


class Run:
    """One run under the real ledger."""

    def __init__(self, lengths: Lengths, *, slots: int, max_staleness: int, window: int, train_s: float) -> None:
        self._lengths, self._train_s, self._staleness = lengths, train_s, max_staleness
        self._load_s = LOAD_SHARE * train_s
        self._ledger = Ledger(Limits(
            groups_per_step=P, group_size=G, max_staleness=max_staleness, window=window, min_usable=1, zero_signal=False,
            unscored="drop_sample", max_consecutive_drops=1, max_attempts=3,
        ))  # fmt: skip
        self._engine = Engine(free=slots)
        self._events: list[Event] = []
        self._training = False
        self._step_of: dict[int, int] = {}
        self.closed_s: list[float] = []

    def seconds_a_step(self) -> float:
        self._publish(0.0, 0)
        while len(self.closed_s) < STEPS:
            event = heapq.heappop(self._events)
            now_s = event.at_s
            if event.kind == "loaded":
                self._engine.loaded.append((now_s, event.seq))
            elif event.kind == "trained":
                self._training = False
                self.closed_s.append(now_s)
                self._publish(now_s, len(self.closed_s))
            elif not self._submit(event):
                self._lend(now_s)
                continue  # no batch can become due
            self._train(now_s)
            self._lend(now_s)
        return (self.closed_s[-1] - self.closed_s[WARM_STEPS - 1]) / (STEPS - WARM_STEPS)

    def _publish(self, now_s: float, step: int) -> None:
        version, _ = self._ledger.publish(step)
        self._step_of[version.number] = step
        heapq.heappush(self._events, Event(now_s + self._load_s, "loaded", version.number))

    def _lend(self, now_s: float) -> None:
        """Leases for places that are free; a sample starts once its least version is loaded."""
        engine, ledger = self._engine, self._ledger
        if not engine.loaded or ledger.published is None or engine.loaded[-1][1] < ledger.published.number:
            return  # whatever were leased now would have to wait for the version that is being loaded
        while engine.free:
            if not engine.waiting:
                if not ledger.room():
                    return
                group, _ = ledger.open_group(holder="a", lease_id="l", now=now_s, lapse_at=math.inf, prompt_id="p", prompt_row=0)
                engine.waiting.extend((group.seq, index) for index in range(G))
            seq, index = engine.waiting.popleft()
            engine.free -= 1
            engine.started[seq, index] = now_s
            heapq.heappush(self._events, Event(now_s + self._lengths.of(seq)[index], "drawn", seq, index))

    def _submit(self, event: Event) -> bool:
        """Whether the sample completed its group."""
        tokens = self._lengths.of(event.seq)[event.index]
        spans = self._engine.spans(self._engine.started.pop((event.seq, event.index)), tokens)
        facts = SampleFacts(reward=float(event.index), num_prompt_tokens=1, num_completion_tokens=tokens, num_trained_tokens=tokens, spans=spans)
        taken = self._ledger.submit(f"g{event.seq:08d}", event.index, facts)
        assert taken.status == "accepted"
        self._engine.free += 1
        return taken.group == "complete"

    def _train(self, now_s: float) -> None:
        if self._training:
            return
        step = self._ledger.step
        plan, _ = self._ledger.form(step)
        if plan is None:
            return
        for row in self._ledger.table(plan):
            oldest = min(self._step_of[version] for version, _ in row.facts.spans)
            if step - oldest > self._staleness:
                raise RuntimeError(f"a token of step {oldest} is trained at step {step}: older than S={self._staleness}")
        self._training = True
        heapq.heappush(self._events, Event(now_s + self._train_s, "trained"))


def makespan_s(lengths: Lengths, step: int, slots: int) -> float:
    """Seconds to draw the groups of a step on an empty engine, in order, each on the place that is free first."""
    places = [0.0] * slots
    for seq in range(step * P, (step + 1) * P):
        for tokens in lengths.of(seq):
            heapq.heappushpop(places, places[0] + tokens)
    return max(places)


def synchronous_s(lengths: Lengths, slots: int, train_s: float) -> float:
    return statistics.fmean(makespan_s(lengths, step, slots) + train_s * (1 + LOAD_SHARE) for step in range(WARM_STEPS, STEPS))


def one_step_off_s(lengths: Lengths, slots: int, train_s: float) -> float:
    """The next batch is drawn while one is trained; both begin together once the version before is loaded."""
    return statistics.fmean(max(makespan_s(lengths, step, slots), train_s) + LOAD_SHARE * train_s for step in range(WARM_STEPS, STEPS))


def measured(seed: int, *, slots: int, max_staleness: int, window: int) -> Pair:
    lengths = Lengths(seed, (STEPS + max_staleness + 2) * P)
    train_s = P * G * mean_tokens() / slots
    return {
        "ours": Run(lengths, slots=slots, max_staleness=max_staleness, window=window, train_s=train_s).seconds_a_step(),
        "bound": lengths.bound_s(slots, train_s),
        "sync": synchronous_s(lengths, slots, train_s),
        "one_step": one_step_off_s(lengths, slots, train_s),
    }


def best_window(max_staleness: int) -> int:
    """Half of what the rule allows: as many groups may overtake a straggler as may be open behind it."""
    return max_staleness * P // 2 + 1


def grid(num_pairs: int) -> dict[str, dict[str, float]]:
    """of_bound by S and slots."""
    return {
        f"S={staleness}": {
            name: round(_line.ratio([measured(seed, slots=P * G // share, max_staleness=staleness, window=best_window(staleness)) for seed in range(num_pairs)], "bound", "ours"), 3)
            for name, share in SHARE_OF_PG.items()
        }
        for staleness in (0, 1, 2, 4, 8)
    }


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    window = best_window(4)
    pairs = [measured(100 + seed, slots=P * G // 8, max_staleness=4, window=window) for seed in range(max(options.pairs, _line.MIN_PAIRS))]
    table = grid(1)
    print("of_bound     " + "".join(f"{name:>8}" for name in SHARE_OF_PG) + "   (slots)")
    for name, row in table.items():
        print(f"{name:12} " + "".join(f"{value:8.3f}" for value in row.values()))
    bars = [
        Bar(name="of_bound", value=_line.ratio(pairs, "bound", "ours"), op=">=", bar=0.93),
        Bar(name="vs_sync", value=_line.ratio(pairs, "sync", "ours"), op=">=", bar=2),
        Bar(name="vs_one_step", value=_line.ratio(pairs, "one_step", "ours"), op=">=", bar=1.4),
    ]
    notes = {"unit": "virtual seconds a step", "P": P, "G": G, "S": 4, "W": window, "slots": P * G // 8, "of_bound_grid": table}
    _line.report("overlap", bars=bars, pairs=pairs, packages=("numpy",), quiet=options.json, notes=notes)


if __name__ == "__main__":
    main()
