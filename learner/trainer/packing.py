"""Samples of one rank into packed rows, the prompt of a group computed once for its samples in a row.

A row is a concatenation of documents. A document is one prompt and the completions (branches) that follow from it:

    ids       p p p | a a . | b b b .        (the last token of a completion predicts nothing and is left out)
    position  0 1 2   3 4     3 4 5
    branch    - - -   0 0     1 1 1
    document  0 0 0   0 0     0 0 0

The prompt's last token predicts the first token of every branch. Targets are explicit (row index, token id) pairs, so
nothing is ever shifted across a border.

A sample of several strands (its context was rewritten) has a document for each context, and all of them lie in one row: what is computed
over a whole sample (ratios of sequences, what is still to come) sees all of its tokens. Documents that must share a row are a bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from learner.algorithms.proximal import token_staleness
from learner.trainer.mask import PROMPT
from learner.trainer.samples import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSample:
    """A strand of a sample with the sample's advantage. Example: WeightedSample(sample=s, advantage=1.73, staleness=1)"""

    sample: Sample
    advantage: float
    staleness: int = 0  # of its oldest token, in steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One packed row of `length` input tokens and `num_targets` tokens to train on.

    Example: prompt [5, 6], completions [7, 2] and [8]: ids [5, 6, 7], position [0, 1, 2], branch [-1, -1, 0],
    query [1, 2, 1], target [7, 2, 8].
    """

    ids: Tensor  # int64 [length]
    position: Tensor  # int64 [length], restarts at each document, continues after the prompt in each branch
    document: Tensor  # int64 [length]
    branch: Tensor  # int64 [length], PROMPT for prompt tokens, distinct over the row
    query: Tensor  # int64 [num_targets], row index whose output predicts the target
    target: Tensor  # int64 [num_targets], token ids
    behaviour: Tensor  # float32 [num_targets]
    advantage: Tensor  # float32 [num_targets]
    sequence_tokens: Tensor  # int64 [num_targets], trained tokens of the sample that the target belongs to
    sequence: Tensor  # int64 [num_targets], which sample of the row the target belongs to, from 0, not falling; a sample's targets in the order of time
    num_sequences: int
    staleness: Tensor  # int64 [num_targets], in steps
    kept: Tensor  # bool [num_targets], False: masked by a choice over the whole batch
    selected: Tensor  # bool [num_targets], True: held back by a choice over the whole batch
    reference: Tensor | None = None  # float32 [num_targets], log-probs of the KL's reference model; None: there is none
    teacher: Tensor | None = None  # float32 [num_targets], log-probs of the teacher; None: there is none
    value: Tensor | None = None  # float32 [num_targets], the critic's at the start of the step; None: there is no critic
    returns: Tensor | None = None  # as value: what the critic is trained towards
    start: Tensor | None = None  # float32 [num_targets], log-probs at the start of the step; None: not computed apart
    turn_reward: Tensor | None = None  # float32 [num_targets], part of the sample's reward that came with this token; None: all came at its end
    data_set: str = ""  # whose samples it holds: a row never mixes two, since each may have its own loss

    @property
    def num_targets(self) -> int:
        return self.target.numel()

    def to(self, device: torch.device) -> Row:
        """The same row on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for name, value in values.items()}
        return Row(**moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    """A prompt and some strands that follow from it."""

    samples: tuple[WeightedSample, ...]

    @property
    def num_tokens(self) -> int:
        prompt = self.samples[0].sample.prompt_ids.numel()
        return prompt + sum(weighted.sample.completion_ids.numel() - 1 for weighted in self.samples)

    @property
    def num_pairs(self) -> int:
        """Pairs (query, key) of which the query sees the key."""
        prompt = self.samples[0].sample.prompt_ids.numel()
        bodies = [weighted.sample.completion_ids.numel() - 1 for weighted in self.samples]
        return prompt * (prompt + 1) // 2 + sum(body * prompt + body * (body + 1) // 2 for body in bodies)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bundle:
    """Documents that share a row because they hold strands of the same samples. Most have one."""

    documents: tuple[_Document, ...]

    @property
    def num_tokens(self) -> int:
        return sum(document.num_tokens for document in self.documents)

    @property
    def num_pairs(self) -> int:
        """Pairs (query, key) of which the query sees the key."""
        return sum(document.num_pairs for document in self.documents)


def pack(samples: Sequence[WeightedSample], *, row_tokens: int, share_prefix: bool) -> list[Row]:
    """Rows of at most row_tokens input tokens; a single sample longer than that gets a row of its own, whole, with all its strands.

    Strands without a trained token make no row. First fit, longest bundle first, ties in the order given, so the result depends on nothing
    else. share_prefix: samples of a group that go on from the same prompt share it.
    """
    return Plan(samples, row_tokens=row_tokens, share_prefix=share_prefix).rows()


class Plan:
    """Which documents share a row, before any row is made. Example: `plan = Plan(samples, row_tokens=2048, share_prefix=True); plan.rows(num_rows=4)`"""

    def __init__(self, samples: Sequence[WeightedSample], *, row_tokens: int, share_prefix: bool) -> None:
        self._row_tokens = row_tokens
        self._bundles = _bundles([w for w in samples if w.sample.num_trained_tokens], row_tokens, share_prefix)
        self._bins = _first_fit(self._bundles, row_tokens)

    @property
    def num_rows(self) -> int:
        """Rows that these samples need."""
        return len(self._bins)

    def rows(self, *, num_rows: int | None = None, pairs_per_token: int = 1 << 40) -> list[Row]:
        """As few rows as found, or spread evenly over num_rows where other ranks need so many; fewer where there are fewer bundles.

        Even by cost, the longest bundle to the cheapest row with room: tokens + pairs / pairs_per_token. Args: pairs_per_token, pairs (query, key) that take
        as long as one more token does in the rest of the model.
        """
        bins = self._bins if num_rows is None else _even(self._bundles, num_rows, self._row_tokens, pairs_per_token) or self._bins
        return [_row([document for bundle in content for document in bundle.documents]) for content in bins]


def _even(bundles: Sequence[_Bundle], num_rows: int, row_tokens: int, pairs_per_token: int) -> list[list[_Bundle]]:
    """Bins of about the same cost; none where they would not all fit that way."""
    bins: list[list[_Bundle]] = [[] for _ in range(num_rows)]
    cost, free = [0.0] * num_rows, [row_tokens] * num_rows
    for bundle in sorted(bundles, key=lambda b: (-b.num_tokens - b.num_pairs / pairs_per_token)):
        room = [i for i in range(num_rows) if free[i] >= bundle.num_tokens or not bins[i]]
        if not room:
            return []
        index = min(room, key=lambda i: (cost[i], i))
        bins[index].append(bundle)
        cost[index] += bundle.num_tokens + bundle.num_pairs / pairs_per_token
        free[index] -= bundle.num_tokens
    return [content for content in bins if content]


def _first_fit(bundles: Sequence[_Bundle], row_tokens: int) -> list[list[_Bundle]]:
    bins: list[list[_Bundle]] = []
    free: list[int] = []
    for bundle in sorted(bundles, key=lambda b: -b.num_tokens):
        fitting = (i for i, room in enumerate(free) if room >= bundle.num_tokens)
        index = next(fitting, None)
        if index is None:
            bins.append([bundle])
            free.append(row_tokens - bundle.num_tokens)
        else:
            bins[index].append(bundle)
            free[index] -= bundle.num_tokens
    return bins


def _bundles(strands: Sequence[WeightedSample], row_tokens: int, share_prefix: bool) -> list[_Bundle]:
    """One bundle a sample, or groups cut into as few bundles as the budget allows."""
    samples: dict[tuple[str, int], list[WeightedSample]] = {}
    for weighted in strands:
        samples.setdefault((weighted.sample.group_id, weighted.sample.sample_index), []).append(weighted)
    groups: dict[str | tuple[str, int], list[list[WeightedSample]]] = {}
    for key, members in samples.items():
        groups.setdefault(key[0] if share_prefix else key, []).append(members)
    return [bundle for members in groups.values() for bundle in _split(members, row_tokens)]


def _split(samples: Sequence[Sequence[WeightedSample]], row_tokens: int) -> list[_Bundle]:
    """Bundles of whole samples that share a prompt, each within the budget where it holds several samples."""
    made: list[_Bundle] = []
    for prompts in _by_first_prompt(samples):
        taken: list[WeightedSample] = []
        for strands in prompts:
            if taken and _bundle([*taken, *strands]).num_tokens > row_tokens:
                made.append(_bundle(taken))
                taken = []
            taken += strands
        made.append(_bundle(taken))
    return made


def _by_first_prompt(samples: Sequence[Sequence[WeightedSample]]) -> list[list[Sequence[WeightedSample]]]:
    """Samples that begin with the same prompt, in the order given: others gain nothing by sharing a bundle."""
    found: dict[bytes, list[Sequence[WeightedSample]]] = {}
    for strands in samples:
        found.setdefault(strands[0].sample.prompt_ids.numpy().tobytes(), []).append(strands)
    return list(found.values())


def _bundle(strands: Sequence[WeightedSample]) -> _Bundle:
    """Strands with the same prompt share a document."""
    documents: dict[bytes, list[WeightedSample]] = {}
    for weighted in strands:
        documents.setdefault(weighted.sample.prompt_ids.numpy().tobytes(), []).append(weighted)
    return _Bundle(documents=tuple(_Document(samples=tuple(members)) for members in documents.values()))


def _row(documents: Sequence[_Document]) -> Row:
    ids: list[Tensor] = []
    position: list[Tensor] = []
    document_ids: list[Tensor] = []
    branch: list[Tensor] = []
    targets: list[tuple[Tensor, WeightedSample]] = []
    length = num_branches = 0
    for number, document in enumerate(documents):
        prompt = document.samples[0].sample.prompt_ids
        prompt_end = length + prompt.numel() - 1
        segments = [(prompt, 0, PROMPT)]
        start = length + prompt.numel()
        for weighted in document.samples:
            body = weighted.sample.completion_ids[:-1]
            segments.append((body, prompt.numel(), num_branches))
            queries = torch.cat([torch.tensor([prompt_end]), torch.arange(start, start + body.numel())])
            targets.append((queries, weighted))
            start += body.numel()
            num_branches += 1
        for tokens, first_position, branch_id in segments:
            ids.append(tokens)
            position.append(torch.arange(first_position, first_position + tokens.numel()))
            branch.append(torch.full((tokens.numel(),), branch_id))
            document_ids.append(torch.full((tokens.numel(),), number))
        length = start
    return Row(ids=torch.cat(ids), position=torch.cat(position), document=torch.cat(document_ids), branch=torch.cat(branch), **_targets(targets))


def _targets(targets: Sequence[tuple[Tensor, WeightedSample]]) -> dict[str, Any]:
    """The fields of Row that are about targets: trained tokens only, those of a sample together."""
    number: dict[tuple[str, int], int] = {}
    for _, w in targets:
        number.setdefault((w.sample.group_id, w.sample.sample_index), len(number))
    ordered = sorted(targets, key=lambda pair: (number[pair[1].sample.group_id, pair[1].sample.sample_index], pair[1].sample.strand))
    kept = [(queries, weighted, weighted.sample.loss_mask) for queries, weighted in ordered]
    num_targets = sum(int(mask.sum()) for _, _, mask in kept)
    return {
        "query": torch.cat([queries[mask] for queries, _, mask in kept]),
        "target": torch.cat([w.sample.completion_ids[mask] for _, w, mask in kept]),
        "behaviour": torch.cat([w.sample.behaviour[mask] for _, w, mask in kept]),
        "advantage": torch.cat([torch.full((int(mask.sum()),), w.advantage) for _, w, mask in kept]),
        "sequence_tokens": torch.cat([torch.full((int(mask.sum()),), w.sample.num_sample_tokens) for _, w, mask in kept]),
        "sequence": torch.cat([torch.full((int(mask.sum()),), number[w.sample.group_id, w.sample.sample_index]) for _, w, mask in kept]),
        "num_sequences": len(number),
        "staleness": torch.cat([_staleness(w)[mask] for _, w, mask in kept]),
        "turn_reward": _turn_rewards(kept),
        **_nothing_chosen(num_targets),
    }


def _turn_rewards(kept: Sequence[tuple[Tensor, WeightedSample, Tensor]]) -> Tensor | None:
    """Rewards by turn of every target; None where no sample has any."""
    if all(weighted.sample.turn_rewards is None for _, weighted, _ in kept):
        return None
    return torch.cat([(torch.zeros(mask.numel()) if w.sample.turn_rewards is None else w.sample.turn_rewards)[mask] for _, w, mask in kept])


def _staleness(weighted: WeightedSample) -> Tensor:
    """Staleness of each completion token."""
    versions = weighted.sample.token_versions
    if versions is None:
        return torch.full((weighted.sample.completion_ids.numel(),), weighted.staleness)
    return token_staleness(weighted.staleness, versions, oldest_version=weighted.sample.first_version)


def _nothing_chosen(num_targets: int) -> dict[str, Tensor]:
    return {"kept": torch.ones(num_targets, dtype=torch.bool), "selected": torch.zeros(num_targets, dtype=torch.bool)}


def dummy_row() -> Row:
    """One token and nothing to train on: what a rank computes while others have rows left."""
    zero = torch.zeros(1, dtype=torch.int64)
    none, none_float = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    empty: dict[str, Any] = {"query": none, "target": none, "behaviour": none_float, "advantage": none_float, "sequence_tokens": none, "sequence": none, "num_sequences": 0, "staleness": none}
    return Row(ids=zero, position=zero, document=zero, branch=zero, **{**empty, **_nothing_chosen(0)})
