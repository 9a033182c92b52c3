"""A small run of a ledger and a picker: groups are opened, sampled by hidden pass rates, dropped or trained, and the run may be killed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from learner.data_config import DataConfig
from learner.gateway.choosers import picker_of, rules_of
from learner.gateway.groups import SampleFacts
from learner.gateway.ledger import Ledger
from learner.gateway.picking import Picker
from learner.gateway.prompts import Prompt
from learner.gateway.terms import Limits

GROUP_SIZE = 4


def prompts(num: int, **fields: Any) -> list[Prompt]:
    """fields: lists of one value a prompt."""
    return [Prompt(prompt_id=str(n), text="x", messages=({"role": "user", "content": "x"},), fields={name: values[n] for name, values in fields.items()}) for n in range(num)]


@dataclass(kw_only=True)
class Run:
    """P = 2, S = 1. rates: hidden pass rate by catalog row; unusable: rows whose samples are never usable. picks: (data set, row) in order."""

    data: Mapping[str, Any]
    sets: Mapping[str, list[Prompt]]
    rates: Mapping[int, float] = field(default_factory=dict)
    unusable: frozenset[int] = frozenset()
    limits: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    picks: list[tuple[str, int]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)  # rows of each plan

    def __post_init__(self) -> None:
        self.ledger = Ledger(Limits(**{"groups_per_step": 2, "group_size": GROUP_SIZE, "max_staleness": 1, "max_consecutive_drops": 10_000, **self.limits}))
        self.picker = self._picker()
        config = DataConfig.model_validate(self.data)
        record = self.ledger.set_data({name: rules_of(one) for name, one in config.sources.items()})
        self._keep(record)
        self._keep(self.ledger.publish(0)[1])

    def _picker(self) -> Picker:
        return picker_of(DataConfig.model_validate(self.data).sources, self.sets, seed=self.seed)

    def _keep(self, record: dict[str, Any] | None) -> None:
        if record is not None:
            self.records.append(msgpack.unpackb(msgpack.packb(record), strict_map_key=False))

    def open(self) -> bool:
        """Opens one group; False when the data have ended."""
        pick = self.picker.next(self.ledger.account.history, self.ledger.step)
        if pick is None:
            return False
        _, record = self.ledger.open_group(holder="a", lease_id=str(len(self.picks)), now=0.0, lapse_at=9e9, prompt_id="p", prompt_row=pick.row, data_set=pick.data_set, pick=pick.note)
        self._keep(record)
        self.picks.append((pick.data_set, pick.row))
        return True

    def fill(self, num_groups: int) -> None:
        """Opens, samples and trains until so many groups were opened or the data ended."""
        while len(self.picks) < num_groups and not self.ledger.exhausted:
            more = True
            while more and self.ledger.room() and len(self.picks) < num_groups:
                more = self.open()
            seqs = sorted(seq for seq, complete in self.ledger.account.outside() if not complete)
            for seq in seqs:
                self._sample(seq)
            ended = self.picker.next(self.ledger.account.history, self.ledger.step) is None
            self._train(ended=ended)
            if ended and not self.ledger.account.num_open:
                return

    def _sample(self, seq: int) -> None:
        group = self.ledger.account.groups[seq]
        passed = round(self.rates.get(group.prompt_row, 0.5) * GROUP_SIZE)
        reason = "aborted" if group.prompt_row in self.unusable else ""
        for index in range(GROUP_SIZE):
            facts = SampleFacts(reward=float(index < passed), unusable_reason=reason, num_prompt_tokens=1, num_completion_tokens=1, num_trained_tokens=1, spans=((self.ledger.account.versions.last_number, 1),))
            self._keep(self.ledger.submit(group.group_id, index, facts).record)

    def _train(self, *, ended: bool) -> None:
        while True:
            plan, record = self.ledger.form(self.ledger.step, data_ended=ended)
            if plan is None or not plan.groups:
                return
            self._keep(record)
            self.batches.append([self.ledger.account.groups[seq].prompt_row for seq in plan.groups])
            self._keep(self.ledger.publish(self.ledger.step + 1)[1])
            self._keep(self.ledger.cover(self.ledger.step))

    def kill(self, *, from_records: bool) -> None:
        """The account comes back from its saved state, or from all its records; the picker is made anew."""
        if from_records:
            ledger = Ledger(self.ledger.limits)
            for record in self.records:
                ledger.apply(record)
        else:
            ledger = Ledger.from_state(self.ledger.limits, msgpack.unpackb(msgpack.packb(self.ledger.state()), strict_map_key=False))
        assert ledger.state() == self.ledger.state()
        self.ledger, self.picker = ledger, self._picker()

    def rows(self, name: str = "") -> list[int]:
        return [row for data_set, row in self.picks if data_set == name]


def in_pieces(run: Run, num_groups: int, *, seed: int, kill: bool) -> None:
    """As `fill`, in pieces of random length; killed after each."""
    rng = random.Random(seed)
    while len(run.picks) < num_groups:
        run.fill(min(num_groups, len(run.picks) + rng.randint(1, 7)))
        from_records = rng.random() < 0.5
        if kill:
            run.kill(from_records=from_records)
