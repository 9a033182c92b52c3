"""A step's tokens as columns: what the engine's process sends in place of one object a request.

vLLM's EngineCore answers a step with one object a request, each with three small arrays of log-probs, and the thread that makes
and encodes them is what bounds a small model on a fast chip. Here a step is three arrays for all requests together, carried by
one ordinary output of vLLM under a name that no request has. vllm_scheduler.py packs them, vllm_intake.py unpacks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MARK = "headrace:columns"  # request_id of the output that carries a step; process_outputs of the front end leaves unknown names alone
HANDLE = "headrace_handle"  # key in SamplingParams.extra_args: this request's number, which makes it travel in columns
ENDS = ("", "stop", "length", "abort", "error", "repetition")  # by code; vLLM's FinishReason plus one, 0: it goes on
NO_TOKEN = -1  # of a row that only says that the request ended


@dataclass(kw_only=True, slots=True)
class Rows:
    """Rows being gathered. Example: `rows = Rows(); rows.add(7, [15, 2], end=1); rows.add(9, [4], end=0)` gives three rows."""

    handles: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, handle: int, tokens: Sequence[int], *, end: int) -> None:
        """The tokens of one request in the order they were drawn; the end stands in the last row."""
        for token in tokens or (NO_TOKEN,):
            self.handles.append(handle)
            self.tokens.append(token)
            self.ends.append(0)
        self.ends[-1] = end

    def arrays(self, logprobs: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
        """int64 [rows, 2] of (handle, token), float32 [rows, 1] of log-probs, int64 [rows] of ends: the three places of vLLM's LogprobsLists."""
        assert logprobs.shape == (len(self.handles),), f"{len(self.handles)} rows and log-probs of shape {logprobs.shape}"
        table = np.array([self.handles, self.tokens], dtype=np.int64).T
        return np.ascontiguousarray(table), logprobs.astype(np.float32, copy=False)[:, None], np.array(self.ends, dtype=np.int64)


def rows_of(table: NDArray[np.int64], logprobs: NDArray[np.float32], ends: NDArray[np.int64]) -> Iterator[tuple[int, int, float, int]]:
    """(handle, token or NO_TOKEN, log-prob, end code) in the order of drawing; the log-prob is the float32 that the engine computed."""
    assert table.shape == (len(ends), 2) and logprobs.shape == (len(ends), 1), f"shapes {table.shape}, {logprobs.shape}, {ends.shape}"
    return zip(table[:, 0].tolist(), table[:, 1].tolist(), logprobs[:, 0].tolist(), ends.tolist(), strict=True)
