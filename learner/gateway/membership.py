"""The groups of one epoch: one for each transport in use, ranks given out by member and worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.gateway.epochs import Member
from protos.learner.v1alpha1 import learner_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Example: two replicas, one of them of two workers, by gloo: one sender's spec with num_receivers=3, members' ranks 1 and 2."""

    senders: tuple[pb.GroupSpec, ...]  # receiver_rank 0; in the order of sending
    specs: dict[Member, pb.GroupSpec]  # receiver_rank: of the member's first worker


def make_groups(common: pb.GroupSpec, members: Sequence[tuple[Member, pb.Transport, int]]) -> Groups:
    """common: what all share, group_key being that of the membership. members: with transport and number of workers, in order."""
    transports = list(dict.fromkeys(transport for _, transport, _ in members))
    senders, specs = [], {}
    for transport in transports:
        mine = [(member, workers) for member, used, workers in members if used == transport]
        spec = pb.GroupSpec()
        spec.CopyFrom(common)
        spec.transport, spec.num_receivers = transport, sum(workers for _, workers in mine)
        if len(transports) > 1:
            spec.group_key = f"{common.group_key}-{pb.Transport.Name(transport).removeprefix('TRANSPORT_').lower()}"
        spec.receivers.extend(name if workers == 1 else f"{name} worker {worker}" for (name, _), workers in mine for worker in range(workers))
        senders.append(spec)
        rank = 1
        for member, workers in mine:
            specs[member] = pb.GroupSpec()
            specs[member].CopyFrom(spec)
            specs[member].receiver_rank = rank
            rank += workers
    return Groups(senders=tuple(senders), specs={member: specs[member] for member, _, _ in members})
