"""Which trainer rank gets which group of a batch: pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def owners(group_tokens: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Owner rank of each group, [num_groups]: whole groups, balanced by tokens, the longest first to the emptiest rank.

    Deterministic: ties go to the earlier group and the lower rank. The heaviest rank carries at most 4/3 of the best
    possible maximum (Graham 1969, largest processing time first). Example: owners([5, 9, 4], 2) == (1, 0, 1).
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: a batch needs at least one rank")
    loads = [(0, 0, rank) for rank in range(num_ranks)]  # tokens, groups, rank: empty groups spread too
    result = [0] * len(group_tokens)
    for index in sorted(range(len(group_tokens)), key=lambda i: (-group_tokens[i], i)):
        tokens, groups, rank = loads[0]
        heapq.heapreplace(loads, (tokens + group_tokens[index], groups + 1, rank))
        result[index] = rank
    return tuple(result)
