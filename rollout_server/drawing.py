"""What a replica knows of one sample while it draws it: what earlier holders drew, and what its own engine has added."""

from __future__ import annotations

from dataclasses import replace

from protos.identity import continued_seed
from rollout_server.engine import Delta, Finish, SamplingSpec
from rollout_server.spans import Span


class Drawing:
    """A completion that grows over one request or several, each drawing on from where the one before ended.

    Example: two tokens were drawn elsewhere under version 1, two more here under version 3:
        drawing = Drawing(token_ids=[5, 6], logprobs=[-0.1, -0.2], spans=(Span(version=1, start=0, end=2),))
        drawing.begin("r0"); drawing.end(Delta(token_ids=[7, 2], logprobs=[-0.3, -0.4], finish="stop", spans=(Span(version=3, start=0, end=2),)))
        drawing.whole().spans  # (Span(version=1, start=0, end=2), Span(version=3, start=2, end=4))
    """

    def __init__(self, *, token_ids: list[int] | None = None, logprobs: list[float] | None = None, spans: tuple[Span, ...] = (), finish: Finish | None = None) -> None:
        self.token_ids = list(token_ids or ())
        self.logprobs = list(logprobs or ())
        self.spans = spans
        self.finish = finish
        self.request_id = ""  # empty: no request of it runs
        self._offset, self._before = 0, spans  # of the running request: tokens before it, and their spans

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_of_request(self) -> int:
        """Tokens of the running request that are known here."""
        return len(self.token_ids) - self._offset

    def rest(self, spec: SamplingSpec, *, num_prompt_tokens: int, max_model_len: int) -> SamplingSpec | None:
        """The sampling that is left to do; None: nothing, the sample has reached its length."""
        if not self.num_tokens:
            return spec
        left = min(spec.max_new_tokens, max_model_len - num_prompt_tokens) - self.num_tokens
        return replace(spec, max_new_tokens=left, seed=continued_seed(spec.seed, self.num_tokens)) if left > 0 else None

    def begin(self, request_id: str) -> None:
        """A request draws on from here."""
        self.request_id, self._offset, self._before = request_id, self.num_tokens, self.spans

    def grow(self, delta: Delta) -> None:
        """Tokens of the running request that follow the known ones; the delta's spans cover the whole request so far."""
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.spans = joined(self._before, delta.spans, self._offset)

    def end(self, delta: Delta) -> None:
        """The running request's end: the delta has all of its tokens. After "abort" the sample is not finished."""
        del self.token_ids[self._offset :], self.logprobs[self._offset :]
        self.grow(delta)
        self.request_id = ""
        self.finish = None if delta.finish == "abort" else delta.finish

    def stop(self) -> None:
        """The running request is gone; what was seen of it stays."""
        self.request_id = ""

    def whole(self) -> Delta:
        """All of a finished sample."""
        assert self.finish is not None, "a sample that is not finished is not whole"
        return Delta(token_ids=self.token_ids, logprobs=self.logprobs, finish=self.finish, spans=self.spans)


def joined(before: tuple[Span, ...], after: tuple[Span, ...], offset: int) -> tuple[Span, ...]:
    """Spans of `offset` tokens, then those of what followed; neighbours of one version become one."""
    shifted = [Span(version=span.version, start=span.start + offset, end=span.end + offset) for span in after]
    if before and shifted and before[-1].version == shifted[0].version:
        shifted[0] = Span(version=shifted[0].version, start=before[-1].start, end=shifted[0].end)
        before = before[:-1]
    return (*before, *shifted)
