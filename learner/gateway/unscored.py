"""When so many samples come back without a score that going on would be a waste. Pure."""

from __future__ import annotations

from collections import Counter, deque

from learner.gateway.groups import ENVIRONMENT

WINDOW = 512  # samples that are looked at; fewer say nothing yet


class UnscoredShare:
    """The share of samples without a reward among the newest ones: unscored ones, fallbacks counted in, and those whose environment failed.

    Example: `UnscoredShare(most=0.5)` says nothing until 512 samples have come, then why the run should stop once more than 256 had no score.
    """

    def __init__(self, *, most: float | None) -> None:
        self._most = most  # None: the run goes on whatever comes
        self._newest: deque[str] = deque(maxlen=WINDOW)  # reason of each, "" for a score
        self._counts: Counter[str] = Counter()

    def note(self, reason: str) -> None:
        """A sample came; empty: it has a score."""
        if len(self._newest) == WINDOW:
            self._counts[self._newest[0]] -= 1
        self._newest.append(reason)
        self._counts[reason] += 1

    @property
    def _whom(self) -> str:
        failed = {reason.startswith(ENVIRONMENT) for reason, count in self._counts.items() if reason and count}
        return " and ".join(words for of_environment, words in ((False, "the scorer and the reward servers' logs"), (True, "the environment or agent and the rollout servers' logs")) if of_environment in failed)

    @property
    def words(self) -> str:
        """Why the run should stop; empty while it should not."""
        num_unscored = len(self._newest) - self._counts[""]
        if self._most is None or len(self._newest) < WINDOW or num_unscored <= self._most * WINDOW:
            return ""
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self._counts.most_common() if reason and count)
        return (
            f"{num_unscored} of the last {WINDOW} samples came without a score ({reasons}), more than filter.max_unscored_share={self._most:g}; "
            f"see to {self._whom}, then start again, which goes on from the newest cut; or raise max_unscored_share (null: never stop)"
        )
