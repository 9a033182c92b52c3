"""The one error of a weight transfer."""

from __future__ import annotations


class TransferError(RuntimeError):
    """A transfer did not come whole. The message names the group, rank and peers, or the tensors, that are to blame."""
