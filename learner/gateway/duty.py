"""Which trainer incarnation is on duty, and which of its ranks have reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from learner.gateway.bell import Bell
from learner.gateway.refusals import precondition


@dataclass(frozen=True, kw_only=True, slots=True)
class Post:
    """What one incarnation was told when it came on duty.

    Example: `Post(incarnation=1733, world_size=2, cut_dir="", policy_step=0, lineage=0)`.
    """

    incarnation: int  # nanoseconds since the epoch at the trainer's start
    world_size: int
    cut_dir: str  # empty: start from the base weights
    policy_step: int
    lineage: int

    def to_record(self) -> dict[str, Any]:
        return {
            "type": "registered", "incarnation": self.incarnation, "world_size": self.world_size,
            "cut_dir": self.cut_dir, "policy_step": self.policy_step, "lineage": self.lineage,
        }  # fmt: skip

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Post:
        return cls(**{name: record[name] for name in cls.__slots__})


class Duty:
    """Only the newest incarnation is served; its calls begin once all its ranks have reported."""

    def __init__(self) -> None:
        self.post: Post | None = None
        self.assembled = False
        self._ranks: set[int] = set()
        self._bell = Bell()

    @property
    def incarnation(self) -> int:
        """0: no trainer has registered yet."""
        return self.post.incarnation if self.post else 0

    @property
    def world_size(self) -> int:
        return self.post.world_size if self.post else 0

    def admit(self, incarnation: int, rank: int, world_size: int) -> bool:
        """True when this is the first call of a newer incarnation. Raises Refused FAILED_PRECONDITION."""
        if not incarnation or rank >= world_size:
            raise precondition(f"incarnation={incarnation}, rank={rank}, world_size={world_size}: incarnation must be set and rank below world_size")
        if incarnation < self.incarnation:
            raise precondition(f"incarnation {incarnation} has been replaced by {self.incarnation}; exit")
        if incarnation == self.incarnation and world_size != self.world_size:
            raise precondition(f"rank {rank} says world_size={world_size}, the first rank of incarnation {incarnation} said {self.world_size}; start all ranks with one world size")
        return incarnation > self.incarnation

    def check(self, incarnation: int, rank: int = 0) -> None:
        """Raises Refused FAILED_PRECONDITION unless this incarnation is on duty."""
        if incarnation != self.incarnation:
            raise precondition(f"incarnation {incarnation} is not on duty, {self.incarnation} is (0: none); exit, or register first")
        if rank >= self.world_size:
            raise precondition(f"rank {rank} is outside the world of {self.world_size} ranks")

    def begin(self, post: Post, *, assembled: bool = False) -> None:
        """The older incarnation ends here: whoever waits for it is woken and refused."""
        self.post, self.assembled = post, assembled
        self._ranks.clear()
        self._bell.ring()

    def report(self, rank: int) -> bool:
        """Notes a rank; True when it is the last one."""
        self._ranks.add(rank)
        return not self.assembled and len(self._ranks) == self.world_size

    def assemble(self) -> None:
        self.assembled = True
        self._bell.ring()

    async def wait(self, incarnation: int) -> Post:
        """Until all ranks have reported. Raises Refused when a newer incarnation came meanwhile."""
        while True:
            self.check(incarnation)
            assert self.post is not None
            if self.assembled:
                return self.post
            await self._bell.wait()
