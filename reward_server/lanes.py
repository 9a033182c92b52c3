"""Queued items in one lane for each (owner, scorer), served in turn, so that none starves another. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from reward_server.outcome import Answered

MAX_BATCH_BYTES = 1 << 20  # of text in one batch, beyond its first item


@dataclass(kw_only=True, slots=True, eq=False)
class Item:
    """One call to be made.

    Example: `Item(seq=7, scorer=0, owner=stream, prompt="1 + 1?", completion="2", fields=b"", answer=print)`
    """

    seq: int  # unique in the pool
    scorer: int  # index of the configured scorer
    owner: Hashable  # whom it is for; forgotten together
    prompt: str
    completion: str | list[str]  # a list: a whole group
    fields: bytes  # serialized Struct
    answer: Callable[[Answered], None]  # called once, unless the owner is forgotten
    alone: bool = False  # goes in a batch of its own: it may be what broke a batch before
    gone: bool = False  # nobody waits for it any more
    sent_at_s: float = 0.0  # loop time when it was given to a process

    @property
    def num_bytes(self) -> int:
        """Size of its text, in characters and bytes of fields."""
        text = len(self.completion) if isinstance(self.completion, str) else sum(map(len, self.completion))
        return len(self.prompt) + text + len(self.fields)


class Lanes:
    """Bounded by its users: a stream reads no more than it may have pending."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[tuple[Hashable, int], deque[Item]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, item: Item) -> None:
        """Adds an item at the end of its lane."""
        self._lanes.setdefault((item.owner, item.scorer), deque()).append(item)
        self._count += 1

    def push_front(self, items: Iterable[Item]) -> None:
        """Puts items back, in their order, before everything else."""
        for item in reversed(list(items)):
            key = (item.owner, item.scorer)
            self._lanes.setdefault(key, deque()).appendleft(item)
            self._lanes.move_to_end(key, last=False)
            self._count += 1

    def take(self, room: Callable[[Item], int]) -> list[Item]:
        """The next batch, of one lane: at most room(its first item) items; room 0 passes a lane over. Empty: nothing may go now."""
        for key in list(self._lanes):
            num_items = room(self._lanes[key][0])
            if num_items > 0:
                batch = _cut(self._lanes[key], num_items)
                self._count -= len(batch)
                self._lanes.move_to_end(key)
                if not self._lanes[key]:
                    del self._lanes[key]
                return batch
        return []

    def drop(self, owner: Hashable) -> None:
        """Removes an owner's items."""
        for key in [key for key in self._lanes if key[0] == owner]:
            self._count -= len(self._lanes.pop(key))

    def drain(self) -> list[Item]:
        """Removes and returns all items."""
        items = [item for lane in self._lanes.values() for item in lane]
        self._lanes.clear()
        self._count = 0
        return items


def _cut(lane: deque[Item], num_items: int) -> list[Item]:
    """Items from the head: at least one, then while they fit; an item that goes alone is a batch."""
    batch = [lane.popleft()]
    num_bytes = 0
    while lane and len(batch) < num_items and not batch[0].alone and not lane[0].alone:
        num_bytes += lane[0].num_bytes
        if num_bytes > MAX_BATCH_BYTES:
            break
        batch.append(lane.popleft())
    return batch
