"""Wire to the trainer's own types, with every check that the mathematics relies on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.trainer.samples import Sample
from learner.trainer.table import Entry
from protos import arrays
from protos.learner.v1alpha1 import feed_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Numbers about the data path since the batch before; names as in feed.proto.

    Example: Stats(trainer_wait_s=0.2, replica_idle_share=0.01, num_open=9, num_waiting=3, oldest_open_s=4.0, num_dropped={"unusable": 1},
    num_leased=90, num_trained=80, num_generated_tokens=5120, num_replicas=2, tokens_by_staleness={0: 100, 1: 412})
    """

    trainer_wait_s: float
    replica_idle_share: float
    num_open: int
    num_waiting: int
    oldest_open_s: float
    num_dropped: dict[str, int]
    num_leased: int
    num_trained: int
    num_generated_tokens: int
    num_replicas: int
    tokens_by_staleness: dict[int, int]
    staleness_bound: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The batch of one policy step as one rank sees it. Example: Batch(policy_step=3, table=(...), samples=(...), stats=Stats(...))"""

    policy_step: int
    table: tuple[Entry, ...]  # every sample of the batch but the baselines, which stand in the entries of their groups
    samples: tuple[Sample, ...]  # strands of the usable ones that this rank owns, those of one sample together
    stats: Stats


def decode_entry(row: feed_pb2.TableRow) -> Entry:
    """Raises ValueError when a usable row's reward is not finite."""
    if row.usable and not np.isfinite(row.reward):
        raise ValueError(f"table row ({row.group_id}, {row.sample_index}) is usable but its reward is {row.reward}; a sample without a finite reward must be unusable")
    return Entry(
        group_id=row.group_id,
        sample_index=row.sample_index,
        reward=row.reward,
        usable=row.usable,
        unusable_reason=row.unusable_reason,
        num_prompt_tokens=row.num_prompt_tokens,
        num_completion_tokens=row.num_completion_tokens,
        num_trained_tokens=row.num_trained_tokens,
        staleness=row.staleness,
        owner=row.owner,
        truncated=row.truncated,
        num_versions=row.num_versions,
        reward_parts=dict(row.reward_parts),
        data_set=row.data_set,
        num_strands=row.num_strands or 1,
        num_turns=row.num_turns or 1,
    )


def decode_table(rows: Sequence[feed_pb2.TableRow]) -> tuple[Entry, ...]:
    """The samples to train on, each with its group's baseline. Raises ValueError for two baselines of one group, or one without a reward."""
    baselines: dict[str, Entry] = {}
    for row in rows:
        if row.baseline and (row.group_id in baselines or not row.usable):
            raise ValueError(f"table row ({row.group_id}, {row.sample_index}) is a {'second' if row.usable else 'unusable'} baseline of its group; a group in a batch has one with a reward, or none")
        if row.baseline:
            baselines[row.group_id] = decode_entry(row)
    return tuple(replace(decode_entry(row), baseline=baselines.get(row.group_id)) for row in rows if not row.baseline)


def decode_stats(stats: feed_pb2.FeedStats) -> Stats:
    return Stats(
        trainer_wait_s=stats.trainer_wait_s,
        replica_idle_share=stats.replica_idle_share,
        num_open=stats.num_open,
        num_waiting=stats.num_waiting,
        oldest_open_s=stats.oldest_open_s,
        num_dropped=dict(stats.num_dropped),
        num_leased=stats.num_leased,
        num_trained=stats.num_trained,
        num_generated_tokens=stats.num_generated_tokens,
        num_replicas=stats.num_replicas,
        tokens_by_staleness=dict(stats.tokens_by_staleness),
        staleness_bound=stats.staleness_bound,
    )


def decode_sample(message: trajectory_pb2.Trajectory) -> tuple[Sample, ...]:
    """Its strands in order. Raises ValueError when arrays disagree in length or a trained token's log-prob is not finite."""
    first = _strand(message, message, 0)
    if not message.more_strands:
        return (first,)
    strands = (first, *(_strand(message, more, place) for place, more in enumerate(message.more_strands, start=1)))
    num_tokens = sum(strand.num_trained_tokens for strand in strands)
    versions = [version for strand in strands for version in strand.versions]
    return tuple(replace(strand, sample_tokens=num_tokens, first_version=min(versions, default=None)) for strand in strands)


def _strand(message: trajectory_pb2.Trajectory, words: trajectory_pb2.Trajectory | trajectory_pb2.Strand, place: int) -> Sample:
    completion = _ids(words.completion_ids)
    mask = arrays.unpack(words.loss_mask) if words.loss_mask.data else np.ones(len(completion), dtype=np.uint8)
    return Sample(
        group_id=message.group_id,
        sample_index=message.sample_index,
        prompt_ids=torch.from_numpy(_ids(words.prompt_ids)),
        completion_ids=torch.from_numpy(completion),
        behaviour=_floats(arrays.unpack(words.logprobs)),
        loss_mask=torch.from_numpy(mask.astype(np.bool_)),
        text=message.text,
        versions=tuple(span.version for span in words.spans),
        token_versions=_token_versions(words),
        strand=place,
        turn_rewards=_turn_rewards(message, place, len(completion)),
    )


def _token_versions(words: trajectory_pb2.Trajectory | trajectory_pb2.Strand) -> Tensor | None:
    """Version of each completion token; None for a message that says nothing of versions."""
    if not words.spans:
        return None
    return torch.cat([torch.full((span.end - span.start,), span.version, dtype=torch.int64) for span in words.spans])


def _turn_rewards(message: trajectory_pb2.Trajectory, place: int, num_tokens: int) -> Tensor | None:
    """What each turn was given, at its last token; None where no turn of the sample was given anything."""
    if not any(turn.HasField("reward") for turn in message.turns):
        return None
    rewards = torch.zeros(num_tokens)
    for turn in message.turns:
        if turn.strand == place and turn.HasField("reward"):
            rewards[turn.end - 1] += turn.reward
    return rewards


def _ids(array: trajectory_pb2.PackedArray) -> npt.NDArray[np.int64]:
    return arrays.unpack(array).astype(np.int64)


def _floats(values: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def checked_batch(header: feed_pb2.BatchHeader, rows: Sequence[trajectory_pb2.Trajectory], *, rank: int) -> Batch:
    """A rank's batch. Raises ValueError when the rows are not exactly the usable ones of the table that this rank owns, or a
    row has another number of tokens than its table entry says."""
    table = decode_table(header.table)
    owned = {entry.id: entry for entry in table if entry.owner == rank and entry.usable}
    held = {(message.group_id, message.sample_index): decode_sample(message) for message in rows if not message.unusable_reason}
    held = {key: strands for key, strands in held.items() if key in owned}
    if held.keys() != owned.keys():
        raise ValueError(f"batch of step {header.policy_step}: rank {rank} owns {len(owned)} usable samples but got {len(held)}; missing {sorted(owned.keys() - held.keys())[:5]}")
    for key, strands in held.items():
        entry = owned[key]
        said = (entry.num_prompt_tokens, entry.num_completion_tokens, entry.num_trained_tokens)
        got = (sum(s.prompt_ids.numel() for s in strands), sum(s.completion_ids.numel() for s in strands), sum(s.num_trained_tokens for s in strands))
        if said != got:
            raise ValueError(f"sample {key}: the table says {said} prompt, completion and trained tokens, its payload has {got}")
    return Batch(policy_step=header.policy_step, table=table, samples=tuple(strand for strands in held.values() for strand in strands), stats=decode_stats(header.stats))
