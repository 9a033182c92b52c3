"""Reward server: scores completions where user code can be killed. `Unscored` is what a scorer returns when it cannot say;
`batch` marks one that takes many items in one call."""

import protos  # noqa: F401  # before grpc is imported anywhere: it turns its fork handlers off
from reward_server.batched import batch
from reward_server.outcome import Unscored

__all__ = ["Unscored", "batch"]
