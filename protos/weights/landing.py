"""What the engine's own process keeps of a weight update until it is committed.

The engine's worker calls these from its step thread (vLLM: through `collective_rpc`), so every method returns at once;
the receiving runs in a daemon thread while generation goes on.

    landing.begin_receive(group_spec_bytes, manifest_bytes, timeout_s)     # then poll state() until it is not "receiving"
    landing.begin_chunks(manifest_bytes); landing.write_chunk(bucket, offset, data) ...; landing.finish_chunks()
    staging = landing.take(version); model.load(staging.tensors())          # in the pause
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from protos.weights.staging import VerifiedStaging

Phase = Literal["empty", "receiving", "ready", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LandingState:
    """Example: LandingState(phase="failed", version=7, detail="slice 3 of model.norm.weight: digest differs", seconds=0.2)"""

    phase: Phase
    version: int  # of the update under way or ready; 0 when empty
    detail: str  # with failed: what happened, naming the tensor or peer to blame
    seconds: float  # spent receiving


class Landing:
    """One update at a time; a new one drops what lay there. `device` is where staging tensors are allocated and where
    an NCCL group receives; groups are kept between updates while the group key is unchanged."""

    def __init__(self, device: torch.device | None = None) -> None:
        raise NotImplementedError

    def begin_receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        """Starts receiving by collectives. `group`, `manifest`: serialized GroupSpec and Manifest."""
        raise NotImplementedError

    def begin_chunks(self, manifest: bytes) -> None:
        """Opens staging for chunks of a FetchWeights stream."""
        raise NotImplementedError

    def write_chunk(self, bucket: int, offset: int, data: bytes) -> None:
        """Raises TransferError when the chunk does not lie inside the manifest's bucket."""
        raise NotImplementedError

    def finish_chunks(self) -> None:
        """Verifies coverage and digests. Raises TransferError listing the tensors to blame; then nothing is kept."""
        raise NotImplementedError

    def state(self) -> LandingState:
        raise NotImplementedError

    def take(self, version: int) -> VerifiedStaging:
        """Hands over the verified tensors of exactly this version. Raises TransferError otherwise."""
        raise NotImplementedError

    def discard(self) -> None:
        """Gives up what runs and frees what lies there. A receive that blocks is abandoned, never waited for."""
        raise NotImplementedError

    def close(self) -> None:
        """discard, and the groups are closed."""
        raise NotImplementedError
