"""A plan as the manifest that announces it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from learner.weights.plan import TransferPlan
from protos.manifest.v1alpha1 import manifest_pb2

Verify = Literal["off", "digest", "logprobs"]
_VERIFY = {"off": manifest_pb2.VERIFY_OFF, "digest": manifest_pb2.VERIFY_DIGEST, "logprobs": manifest_pb2.VERIFY_LOGPROBS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A prompt and its log-probs under the policy. Example: Probe(token_ids=(5, 2, 7), logprobs=(-1.5, -0.25), tolerance=0.1)"""

    token_ids: tuple[int, ...]  # at least two
    logprobs: tuple[float, ...]  # of each token but the first
    tolerance: float  # largest mean absolute difference that a replica may show


def manifest_of(
    plan: TransferPlan, *, policy_step: int, digests: Sequence[Sequence[int]], verify: Verify = "digest", probe: Probe | None = None, adapter: manifest_pb2.Adapter | None = None,
) -> manifest_pb2.Manifest:
    """digests[owner]: of the owner's slices in the plan's order. Version and lineage are the gateway's to fill in."""
    manifest = manifest_pb2.Manifest(policy_step=policy_step, verify=_VERIFY[verify])
    if adapter is not None:
        manifest.adapter.CopyFrom(adapter)
    if probe is not None:
        manifest.probe.CopyFrom(manifest_pb2.Probe(token_ids=probe.token_ids, logprobs=probe.logprobs, tolerance=probe.tolerance))
    for tensor in plan.tensors:
        manifest.tensors.add(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype)
    rest = [iter(values) for values in digests]
    for piece in plan.slices:
        region = piece.region
        manifest.slices.add(
            tensor=piece.tensor, tensor_offset=region.offset, num_bytes=region.num_bytes, owner=piece.owner, bucket=piece.bucket, bucket_offset=piece.bucket_offset,
            digest=next(rest[piece.owner]), num_runs=region.num_runs, stride_bytes=region.stride_bytes,
        )  # fmt: skip
    for bucket in plan.buckets:
        manifest.buckets.add(owner=bucket.owner, num_bytes=bucket.num_bytes, file_offset=bucket.file_offset, root=bucket.root)
    return manifest
