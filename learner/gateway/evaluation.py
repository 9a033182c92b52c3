"""The account of evaluations: which one runs, what of it was lent, answered or lost. Pure: no clock, no IO.

Apart from the training account: these samples are in none of its counts, and its bound does not know them. As there, a mutation is one
record, the same records give the same state, and always: leased = scored + unscored + lost + open, counted in samples. Leases are not
recorded: a restarted gateway lends again what has no answer, and the first answer of an identity wins.

    evaluation_begun     serial, step, version, lineage, num_prompts, num_samples, greedy, fingerprint
    evaluation_lent      serial, groups              for the first time
    evaluation_answered  serial, group, sample, answer
    evaluation_lost      serial, groups, reason      no more is expected of these groups
    evaluation_ended     serial, reason, result      reason: "" when all was answered; result: None when it says nothing of its step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]
PREFIX = "evaluation_"
GIVEN_UP = frozenset({"rolled_back", "other_prompts", "removed"})  # reasons after which the step counts as not evaluated


def group_name(serial: int, group: int) -> str:
    """Identity of one prompt's answers in one evaluation; never that of a training group."""
    return f"e{serial:06d}-{group:08d}"


def parsed(name: str) -> tuple[int, int] | None:
    """(serial, group) of a name; None when it is none of an evaluation."""
    serial, dash, group = name[1:].partition("-")
    if name[:1] == "e" and dash and (serial + group).isascii() and serial.isdigit() and group.isdigit() and group_name(int(serial), int(group)) == name:
        return int(serial), int(group)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One finished sample. Example: Answer(score=1.0, unscored="", num_tokens=3, truncated=False, tokens_by_version=((7, 3),))"""

    score: float | None  # finite; None: there is none
    unscored: str  # why not; empty where there is a score
    num_tokens: int
    truncated: bool
    tokens_by_version: tuple[tuple[int, int], ...]

    def to_record(self) -> list[Any]:
        return [self.score, self.unscored, self.num_tokens, self.truncated, [list(pair) for pair in self.tokens_by_version]]

    @classmethod
    def from_record(cls, record: list[Any]) -> Answer:
        score, unscored, num_tokens, truncated, tokens = record
        return cls(score=score, unscored=unscored, num_tokens=num_tokens, truncated=truncated, tokens_by_version=tuple((version, count) for version, count in tokens))


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """One evaluation of a policy. Only `Evaluations.apply` changes it. Groups are numbered as the prompts, from 0.

    version: the least to draw from. num_samples: drawn at a temperature, a prompt; with `greedy` one more, the last.
    """

    serial: int
    step: int
    version: int
    lineage: int
    num_prompts: int
    num_samples: int
    greedy: bool
    fingerprint: str
    lent: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)  # group to reason
    answers: dict[int, dict[int, Answer]] = field(default_factory=dict)  # by group, then sample index

    @property
    def group_size(self) -> int:
        return self.num_samples + self.greedy

    @property
    def num_wanted(self) -> int:
        return self.num_prompts * self.group_size

    def missing(self, group: int) -> int:
        """Samples of a group that have not come; 0 once the group is lost."""
        return 0 if group in self.lost else self.group_size - len(self.answers.get(group, ()))

    def unfinished(self) -> list[int]:
        """Groups of which something is still expected, in order."""
        return [group for group in range(self.num_prompts) if self.missing(group)]

    def all_answers(self) -> Iterable[tuple[int, int, Answer]]:
        """(group, sample index, answer)."""
        return ((group, index, answer) for group, answers in sorted(self.answers.items()) for index, answer in sorted(answers.items()))

    def counts(self) -> Counter[str]:
        """In samples: leased = scored + unscored + lost + open."""
        scored = sum(answer.score is not None for _, _, answer in self.all_answers())
        answered = sum(len(answers) for answers in self.answers.values())
        lost = sum(self.group_size - len(self.answers.get(group, ())) for group in self.lost)
        leased = len(self.lent) * self.group_size
        return Counter(leased=leased, scored=scored, unscored=answered - scored, lost=lost, open=leased - answered - lost)

    def to_state(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("serial", "step", "version", "lineage", "num_prompts", "num_samples", "greedy", "fingerprint")}
        answers = [[group, index, answer.to_record()] for group, index, answer in self.all_answers()]
        return {**plain, "lent": sorted(self.lent), "lost": sorted([group, reason] for group, reason in self.lost.items()), "answers": answers}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Evaluation:
        answers: dict[int, dict[int, Answer]] = {}
        for group, index, record in state["answers"]:
            answers.setdefault(group, {})[index] = Answer.from_record(record)
        return cls(**{**state, "lent": set(state["lent"]), "lost": dict(state["lost"]), "answers": answers})


class Evaluations:
    """Every evaluation of a run. seen: policy steps that have one. totals: of those that ended. last: what the last one found."""

    def __init__(self) -> None:
        self.current: Evaluation | None = None
        self.next_serial = 0
        self.seen: set[int] = set()
        self.totals: Counter[str] = Counter()
        self.last: dict[str, Any] | None = None

    def counts(self) -> Counter[str]:
        """Over the whole run, in samples."""
        return self.totals + (self.current.counts() if self.current else Counter())

    # Mutations: each returns the record that it made

    def begin(self, *, step: int, version: int, lineage: int, num_prompts: int, num_samples: int, greedy: bool, fingerprint: str) -> Record:
        assert self.current is None, "one evaluation at a time"
        return self._made(
            type="evaluation_begun", serial=self.next_serial, step=step, version=version, lineage=lineage, num_prompts=num_prompts, num_samples=num_samples, greedy=greedy, fingerprint=fingerprint
        )  # fmt: skip

    def lend(self, group: int) -> Record | None:
        """None: it was lent before."""
        return None if group in self._running.lent else self._made(type="evaluation_lent", serial=self._running.serial, groups=[group])

    def answer(self, group: int, sample: int, answer: Answer) -> Record:
        return self._made(type="evaluation_answered", serial=self._running.serial, group=group, sample=sample, answer=answer.to_record())

    def lose(self, groups: list[int], reason: str) -> Record:
        return self._made(type="evaluation_lost", serial=self._running.serial, groups=groups, reason=reason)

    def end(self, reason: str, result: dict[str, Any] | None) -> Record:
        """What was lent and has not come is lost for the same reason."""
        return self._made(type="evaluation_ended", serial=self._running.serial, reason=reason, result=result)

    # State

    def apply(self, record: Record) -> None:
        """Raises ValueError for a record of an unknown type."""
        match record["type"]:
            case "evaluation_begun":
                self.current = Evaluation(**{name: value for name, value in record.items() if name != "type"})
                self.next_serial = record["serial"] + 1
                self.seen.add(record["step"])
            case "evaluation_lent":
                self._running.lent.update(record["groups"])
            case "evaluation_answered":
                self._running.answers.setdefault(record["group"], {})[record["sample"]] = Answer.from_record(record["answer"])
            case "evaluation_lost":
                self._running.lost.update(dict.fromkeys(record["groups"], record["reason"]))
            case "evaluation_ended":
                self._apply_ended(record)
            case unknown:
                raise ValueError(f"journal record of unknown type {unknown!r}: it was written by another version of this program; use that one")

    def _apply_ended(self, record: Record) -> None:
        ended = self._running
        ended.lost.update({group: record["reason"] for group in ended.unfinished() if group in ended.lent})
        self.totals += ended.counts()
        self.last = record["result"] or self.last
        if record["reason"] in GIVEN_UP:
            self.seen.discard(ended.step)
        self.current = None

    @property
    def _running(self) -> Evaluation:
        assert self.current is not None, "no evaluation runs"
        return self.current

    def _made(self, **record: Any) -> Record:
        self.apply(record)
        return record

    def to_state(self) -> dict[str, Any]:
        """Msgpack-able; `from_state` makes an equal one."""
        current = self.current.to_state() if self.current else None
        return {"current": current, "next_serial": self.next_serial, "seen": sorted(self.seen), "totals": dict(self.totals), "last": self.last}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Evaluations:
        made = cls()
        made.current = Evaluation.from_state(state["current"]) if state["current"] else None
        made.next_serial, made.seen, made.totals, made.last = state["next_serial"], set(state["seen"]), Counter(state["totals"]), state["last"]
        return made
