"""Samples of one rank into packed rows, the prompt of a group computed once for its samples in a row.

A row is a concatenation of documents. A document is one prompt and the completions (branches) that follow from it:

    ids       p p p | a a . | b b b .        (the last token of a completion predicts nothing and is left out)
    position  0 1 2   3 4     3 4 5
    branch    - - -   0 0     1 1 1
    document  0 0 0   0 0     0 0 0

The prompt's last token predicts the first token of every branch. Targets are explicit (row index, token id) pairs, so
nothing is ever shifted across a border.
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
    """A sample with its advantage. Example: WeightedSample(sample=s, advantage=1.73, staleness=1)"""

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
    sequence: Tensor  # int64 [num_targets], which sample of the row the target belongs to, from 0, not falling
    num_sequences: int
    staleness: Tensor  # int64 [num_targets], in steps
    kept: Tensor  # bool [num_targets], False: masked by a choice over the whole batch
    selected: Tensor  # bool [num_targets], True: held back by a choice over the whole batch
    reference: Tensor | None = None  # float32 [num_targets], log-probs of the KL's reference model; None: there is none
    teacher: Tensor | None = None  # float32 [num_targets], log-probs of the teacher; None: there is none
    value: Tensor | None = None  # float32 [num_targets], the critic's at the start of the step; None: there is no critic
    returns: Tensor | None = None  # as value: what the critic is trained towards
    start: Tensor | None = None  # float32 [num_targets], log-probs at the start of the step; None: not computed apart
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
    """A prompt and some of its group's samples."""

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


def pack(samples: Sequence[WeightedSample], *, row_tokens: int, share_prefix: bool) -> list[Row]:
    """Rows of at most row_tokens input tokens; a single sample longer than that gets a row of its own, whole.

    Samples without a trained token make no row. First fit, longest document first, ties in the order given, so the result
    depends on nothing else. Raises ValueError when samples of one group have different prompts and share_prefix is on.
    """
    return Plan(samples, row_tokens=row_tokens, share_prefix=share_prefix).rows()


class Plan:
    """Which documents share a row, before any row is made. Example: `plan = Plan(samples, row_tokens=2048, share_prefix=True); plan.rows(num_rows=4)`"""

    def __init__(self, samples: Sequence[WeightedSample], *, row_tokens: int, share_prefix: bool) -> None:
        """Raises ValueError as pack."""
        self._row_tokens = row_tokens
        self._documents = _documents([w for w in samples if w.sample.num_trained_tokens], row_tokens, share_prefix)
        self._bins = _first_fit(self._documents, row_tokens)

    @property
    def num_rows(self) -> int:
        """Rows that these documents need."""
        return len(self._bins)

    def rows(self, *, num_rows: int | None = None, pairs_per_token: int = 1 << 40) -> list[Row]:
        """As few rows as found, or spread evenly over num_rows where other ranks need so many; fewer where there are fewer documents.

        Even by cost, the longest document to the cheapest row with room: tokens + pairs / pairs_per_token. Args: pairs_per_token, pairs (query, key) that take
        as long as one more token does in the rest of the model.
        """
        bins = self._bins if num_rows is None else _even(self._documents, num_rows, self._row_tokens, pairs_per_token) or self._bins
        return [_row(content) for content in bins]


def _even(documents: Sequence[_Document], num_rows: int, row_tokens: int, pairs_per_token: int) -> list[list[_Document]]:
    """Bins of about the same cost; none where they would not all fit that way."""
    bins: list[list[_Document]] = [[] for _ in range(num_rows)]
    cost, free = [0.0] * num_rows, [row_tokens] * num_rows
    for document in sorted(documents, key=lambda d: (-d.num_tokens - d.num_pairs / pairs_per_token)):
        room = [i for i in range(num_rows) if free[i] >= document.num_tokens or not bins[i]]
        if not room:
            return []
        index = min(room, key=lambda i: (cost[i], i))
        bins[index].append(document)
        cost[index] += document.num_tokens + document.num_pairs / pairs_per_token
        free[index] -= document.num_tokens
    return [content for content in bins if content]


def _first_fit(documents: Sequence[_Document], row_tokens: int) -> list[list[_Document]]:
    bins: list[list[_Document]] = []
    free: list[int] = []
    for document in sorted(documents, key=lambda d: -d.num_tokens):
        fitting = (i for i, room in enumerate(free) if room >= document.num_tokens)
        index = next(fitting, None)
        if index is None:
            bins.append([document])
            free.append(row_tokens - document.num_tokens)
        else:
            bins[index].append(document)
            free[index] -= document.num_tokens
    return bins


def _documents(samples: Sequence[WeightedSample], row_tokens: int, share_prefix: bool) -> list[_Document]:
    """One document a sample, or groups cut into as few documents as the budget allows."""
    if not share_prefix:
        return [_Document(samples=(weighted,)) for weighted in samples]
    groups: dict[str, list[WeightedSample]] = {}
    for weighted in samples:
        groups.setdefault(weighted.sample.group_id, []).append(weighted)
    return [document for members in groups.values() for document in _split(members, row_tokens)]


def _split(members: list[WeightedSample], row_tokens: int) -> list[_Document]:
    first = members[0].sample
    documents: list[_Document] = []
    taken: list[WeightedSample] = []
    for weighted in members:
        if not torch.equal(weighted.sample.prompt_ids, first.prompt_ids):
            raise ValueError(f"samples {first.sample_index} and {weighted.sample.sample_index} of group {first.group_id} have different prompts; set trainer.share_prefix=false for such data")
        if taken and _Document(samples=(*taken, weighted)).num_tokens > row_tokens:
            documents.append(_Document(samples=tuple(taken)))
            taken = []
        taken.append(weighted)
    return [*documents, _Document(samples=tuple(taken))]


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
    """The fields of Row that are about targets: trained tokens only."""
    kept = [(queries, weighted, weighted.sample.loss_mask) for queries, weighted in targets]
    return {
        "query": torch.cat([queries[mask] for queries, _, mask in kept]),
        "target": torch.cat([w.sample.completion_ids[mask] for _, w, mask in kept]),
        "behaviour": torch.cat([w.sample.behaviour[mask] for _, w, mask in kept]),
        "advantage": torch.cat([torch.full((int(mask.sum()),), w.advantage) for _, w, mask in kept]),
        "sequence_tokens": torch.cat([torch.full((int(mask.sum()),), int(mask.sum())) for _, _, mask in kept]),
        "sequence": torch.cat([torch.full((int(mask.sum()),), number) for number, (_, _, mask) in enumerate(kept)]),
        "num_sequences": len(kept),
        "staleness": torch.cat([_staleness(w)[mask] for _, w, mask in kept]),
        **_nothing_chosen(sum(int(mask.sum()) for _, _, mask in kept)),
    }


def _staleness(weighted: WeightedSample) -> Tensor:
    """Staleness of each completion token."""
    versions = weighted.sample.token_versions
    if versions is None:
        return torch.full((weighted.sample.completion_ids.numel(),), weighted.staleness)
    return token_staleness(weighted.staleness, versions)


def _nothing_chosen(num_targets: int) -> dict[str, Tensor]:
    return {"kept": torch.ones(num_targets, dtype=torch.bool), "selected": torch.zeros(num_targets, dtype=torch.bool)}


def dummy_row() -> Row:
    """One token and nothing to train on: what a rank computes while others have rows left."""
    zero = torch.zeros(1, dtype=torch.int64)
    none, none_float = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    empty: dict[str, Any] = {"query": none, "target": none, "behaviour": none_float, "advantage": none_float, "sequence_tokens": none, "sequence": none, "num_sequences": 0, "staleness": none}
    return Row(ids=zero, position=zero, document=zero, branch=zero, **{**empty, **_nothing_chosen(0)})
