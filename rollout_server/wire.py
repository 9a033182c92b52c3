"""Between protobuf and what the engine knows: sampling parameters, spans, finish reasons."""

from __future__ import annotations

from collections.abc import Sequence

from protos.arrays import unpack
from protos.learner.v1alpha1 import learner_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from rollout_server.drawing import Drawing
from rollout_server.engine import Finish, SamplingSpec
from rollout_server.spans import Span

FINISH: dict[Finish, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


_FINISHED: dict[int, Finish] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


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


def drawing_of(part: learner_pb2.PartialSample | None) -> Drawing:
    """A sample as far as earlier holders of its lease reported it; None: nothing of it is known."""
    if part is None:
        return Drawing()
    return Drawing(
        token_ids=[int(token) for token in unpack(part.token_ids)], logprobs=[float(value) for value in unpack(part.logprobs)],
        spans=tuple(Span(version=span.version, start=span.start, end=span.end) for span in part.spans), finish=_FINISHED.get(part.finish_reason),
    )  # fmt: skip


def version_spans(spans: Sequence[Span]) -> list[pb.VersionSpan]:
    return [pb.VersionSpan(version=span.version, start=span.start, end=span.end) for span in spans]
