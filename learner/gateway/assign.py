"""Which trainer rank gets which group of a batch: pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

PAIRS_PER_TOKEN = 12_288  # pairs (query, key) of attention that take as long as one more token does elsewhere in a layer of a 2 B model


def group_cost(num_prompt_tokens: int, completions: Sequence[int]) -> int:
    """What training a group costs, in tokens: its prompt once, its completions, and the pairs of attention. Example: group_cost(100, [50, 30]) == 181."""
    pairs = num_prompt_tokens**2 // 2 + sum(length * num_prompt_tokens + length**2 // 2 for length in completions)
    return num_prompt_tokens + sum(completions) + pairs // PAIRS_PER_TOKEN


def owners(group_costs: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Owner rank of each group, [num_groups]: whole groups, balanced by cost, the dearest first to the emptiest rank.

    Deterministic: ties go to the earlier group and the lower rank. The heaviest rank carries at most 4/3 of the best
    possible maximum (Graham 1969, largest processing time first). Example: owners([5, 9, 4], 2) == (1, 0, 1).
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: a batch needs at least one rank")
    loads = [(0, 0, rank) for rank in range(num_ranks)]  # cost, groups, rank: empty groups spread too
    result = [0] * len(group_costs)
    for index in sorted(range(len(group_costs)), key=lambda i: (-group_costs[i], i)):
        cost, groups, rank = loads[0]
        heapq.heapreplace(loads, (cost + group_costs[index], groups + 1, rank))
        result[index] = rank
    return tuple(result)
