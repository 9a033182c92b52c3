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


def sampling_spec(sampling: pb.SamplingParams, *, seed: int | None = None, end_token: int | None = None) -> SamplingSpec:
    """The distribution asked for; unset top_p means 1. Raises ValueError naming what is contradictory.

    seed: in place of the message's own, for one sample of a group. end_token: the model's, which a grammar allows at its end only,
    so that it ends a guided sample whatever stop_token_ids say.
    """
    stops = tuple(sampling.stop_token_ids)
    if sampling.regex or sampling.json_schema:
        if end_token is None:
            raise ValueError("regex and json_schema need an end token, and the model's tokenizer has none (eos_token)")
        stops = tuple(dict.fromkeys((*stops, end_token)))
    return SamplingSpec(
        temperature=round(sampling.temperature, 6) or sampling.temperature,  # a float32 on the wire: 0.7 arrives as 0.699999988
        top_p=round(sampling.top_p, 6) or 1.0,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=stops,
        seed=sampling.seed if seed is None else seed,
        bad_words=tuple(sampling.bad_words),
        regex=sampling.regex,
        json_schema=sampling.json_schema,
    )


def effective(spec: SamplingSpec, *, room_tokens: int) -> pb.SamplingParams:
    """What is in force, every field stated."""
    return pb.SamplingParams(
        temperature=spec.temperature, top_p=spec.top_p, top_k=spec.top_k, stop_token_ids=spec.stop_token_ids,
        max_new_tokens=min(spec.max_new_tokens, room_tokens), seed=spec.seed,
        bad_words=spec.bad_words, regex=spec.regex, json_schema=spec.json_schema,
    )  # fmt: skip


def version_spans(spans: Sequence[Span]) -> list[pb.VersionSpan]:
    return [pb.VersionSpan(version=span.version, start=span.start, end=span.end) for span in spans]
