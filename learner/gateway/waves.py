"""Who may apply a received version now, so that a share of the fleet goes on drawing: pure bookkeeping of one epoch's members.

    received ──▶ waiting ──a place is free──▶ told to commit ──loaded, failed or lost──▶ gone, which frees the place

All at once (share 0) nobody is held. A newer epoch forgets the older one: its members are asked anew.
"""

from __future__ import annotations

from learner.gateway.epochs import Member, Phase


class Waves:
    """Example: Waves(generating_share=0.5) with four replicas lets two of them apply at a time."""

    def __init__(self, *, generating_share: float) -> None:
        self._share = generating_share
        self.epoch = 0
        self._places = 0  # how many may be applying at once
        self._waiting: list[Member] = []
        self._applying: set[Member] = set()

    def begin(self, epoch: int, members: tuple[Member, ...], *, num_attending: int) -> bool:
        """An epoch begins; whether its members hold what they received until they are told."""
        self.epoch, self._waiting, self._applying = epoch, [], set()
        # At least one applies at a time, else nobody ever would.
        self._places = max(1, int(num_attending * (1 - self._share) + 1e-9))
        return self._share > 0 and len(members) > self._places

    def report(self, epoch: int, member: Member, phase: Phase | None) -> tuple[Member, ...]:
        """A member's report; who is told to commit now."""
        if epoch != self.epoch or not epoch:
            return ()
        if phase is Phase.RECEIVED and member not in self._applying and member not in self._waiting:
            self._waiting.append(member)
        elif phase in (Phase.LOADED, Phase.FAILED):
            self._forget(member)
        return self._fill()

    def lost(self, member: Member) -> tuple[Member, ...]:
        """A member's stream ended; who is told to commit now."""
        self._forget(member)
        return self._fill()

    def _forget(self, member: Member) -> None:
        self._applying.discard(member)
        if member in self._waiting:
            self._waiting.remove(member)

    def _fill(self) -> tuple[Member, ...]:
        free = max(0, self._places - len(self._applying))
        told, self._waiting = tuple(self._waiting[:free]), self._waiting[free:]
        self._applying.update(told)
        return told
