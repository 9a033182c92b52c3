"""Reward server: scores completions where user code can be killed. `Unscored` is what a scorer returns when it cannot say."""

from reward_server.outcome import Unscored

__all__ = ["Unscored"]
