"""Whether an engine holds a version's weights: its log-probs of a probe prompt against the trainer's (push.verify: logprobs)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from protos.manifest.v1alpha1 import manifest_pb2


def probe_of(manifest: manifest_pb2.Manifest) -> manifest_pb2.Probe | None:
    """What a version is to be held against; None where its run does not ask for it."""
    return manifest.probe if manifest.verify == manifest_pb2.VERIFY_LOGPROBS and manifest.HasField("probe") else None


async def disagreement(engine: Callable[[Sequence[int]], Awaitable[list[float]]], probe: manifest_pb2.Probe, *, limit_s: float) -> str:
    """Why what was applied is not what the trainer has; empty when it is. engine: log-probs of each token but the first."""
    try:
        ours = await asyncio.wait_for(engine(list(probe.token_ids)), limit_s)
    except Exception as error:  # supervised edge: an engine that cannot be asked has not been verified
        return f"the probe prompt could not be computed: {type(error).__name__}: {error}"
    difference = sum(abs(a - b) for a, b in zip(ours, probe.logprobs, strict=True)) / max(1, len(ours))
    if difference <= probe.tolerance:
        return ""
    return f"log-probs of the probe prompt differ from the trainer's by {difference:.4g} in the mean, more than {probe.tolerance:.4g}: the engine does not hold the version's weights"
