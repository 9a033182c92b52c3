"""Which ranks talk to the replicas: a few of them, each for its own node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

MAX_ROOTS = 8


def assign_roots(sizes: Sequence[int], hosts: Sequence[int], max_roots: int) -> list[int]:
    """root[owner]: a rank of the owner's node, loads balanced: nodes share max_roots evenly, at least one each; a node's first ranks
    are its roots and send their own files; the others' files go, largest first, to the root with least."""
    if len(sizes) <= max_roots:
        return list(range(len(sizes)))
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        nodes[host].append(rank)
    root = [0] * len(sizes)
    for position, ranks in enumerate(nodes.values()):
        share = max(1, max_roots // len(nodes) + (position < max_roots % len(nodes)))
        chosen, load = ranks[:share], {rank: sizes[rank] for rank in ranks[:share]}
        for rank in chosen:
            root[rank] = rank
        for rank in sorted(ranks[share:], key=lambda rank: (-sizes[rank], rank)):
            least = min(chosen, key=lambda candidate: (load[candidate], candidate))
            root[rank] = least
            load[least] += sizes[rank]
    return root
