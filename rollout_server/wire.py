"""Between protobuf and what the engine knows: sampling parameters, spans, finish reasons."""

from __future__ import annotations

from collections.abc import Sequence

from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from rollout_server.engine import Finish, SamplingSpec
from rollout_server.spans import Span

FINISH: dict[Finish, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


def sampling_spec(sampling: pb.SamplingParams, *, seed: int | None = None) -> SamplingSpec:
    """The distribution asked for; unset top_p means 1. Raises ValueError naming what is contradictory.

    seed: in place of the message's own, for one sample of a group.
    """
    return SamplingSpec(
        temperature=round(sampling.temperature, 6) or sampling.temperature,  # a float32 on the wire: 0.7 arrives as 0.699999988
        top_p=round(sampling.top_p, 6) or 1.0,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        seed=sampling.seed if seed is None else seed,
    )


def effective(spec: SamplingSpec, *, room_tokens: int) -> pb.SamplingParams:
    """What is in force, every field stated."""
    return pb.SamplingParams(
        temperature=spec.temperature, top_p=spec.top_p, top_k=spec.top_k, stop_token_ids=spec.stop_token_ids,
        max_new_tokens=min(spec.max_new_tokens, room_tokens), seed=spec.seed,
    )  # fmt: skip


def version_spans(spans: Sequence[Span]) -> list[pb.VersionSpan]:
    return [pb.VersionSpan(version=span.version, start=span.start, end=span.end) for span in spans]
