"""A completion that grows over several requests: tokens, log-probs and spans are those of one."""

from __future__ import annotations

from protos.identity import continued_seed, sample_seed
from rollout_server.drawing import Drawing, joined
from rollout_server.engine import Delta, SamplingSpec
from rollout_server.spans import Span

SPEC = SamplingSpec(temperature=1.0, max_new_tokens=10, seed=7)


def span(version: int, start: int, end: int) -> Span:
    return Span(version=version, start=start, end=end)


def test_what_a_second_request_draws_follows_what_was_known() -> None:
    drawing = Drawing(token_ids=[5, 6], logprobs=[-0.1, -0.2], spans=(span(1, 0, 2),))
    drawing.begin("r0")
    drawing.grow(Delta(token_ids=[7], logprobs=[-0.3], spans=(span(1, 0, 1),)))
    assert (drawing.num_tokens, drawing.num_of_request, drawing.spans) == (3, 1, (span(1, 0, 3),))
    drawing.grow(Delta(token_ids=[8], logprobs=[-0.4], spans=(span(1, 0, 1), span(3, 1, 2))))
    assert drawing.spans == (span(1, 0, 3), span(3, 3, 4))
    drawing.end(Delta(token_ids=[7, 8, 2], logprobs=[-0.3, -0.4, -0.5], finish="stop", spans=(span(1, 0, 1), span(3, 1, 3))))
    assert drawing.whole() == Delta(token_ids=[5, 6, 7, 8, 2], logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5], finish="stop", spans=(span(1, 0, 3), span(3, 3, 5)))


def test_what_was_seen_of_a_request_that_died_stays() -> None:
    drawing = Drawing()
    drawing.begin("r0")
    drawing.grow(Delta(token_ids=[5, 6], logprobs=[-0.1, -0.2], spans=(span(1, 0, 2),)))
    drawing.stop()
    drawing.begin("r1")
    drawing.end(Delta(token_ids=[7], logprobs=[-0.3], finish="abort", spans=(span(2, 0, 1),)))
    assert (drawing.token_ids, drawing.spans, drawing.finish) == ([5, 6, 7], (span(1, 0, 2), span(2, 2, 3)), None)


def test_the_rest_is_shorter_by_what_is_known_and_has_other_random_numbers() -> None:
    drawing = Drawing(token_ids=[5, 6, 7], logprobs=[-0.1] * 3, spans=(span(1, 0, 3),))
    rest = drawing.rest(SPEC, num_prompt_tokens=4, max_model_len=100)
    assert rest is not None and (rest.max_new_tokens, rest.temperature) == (7, 1.0)
    assert rest.seed == continued_seed(7, 3) and rest.seed not in {7, *(sample_seed(7, index) for index in range(4096))}
    cut_short = drawing.rest(SPEC, num_prompt_tokens=4, max_model_len=9)  # 5 tokens fit beside the prompt, 3 are drawn
    assert cut_short is not None and cut_short.max_new_tokens == 2
    assert drawing.rest(SPEC, num_prompt_tokens=4, max_model_len=7) is None
    assert Drawing().rest(SPEC, num_prompt_tokens=4, max_model_len=9) is SPEC  # nothing is known: as ever


def test_neighbouring_spans_of_one_version_become_one() -> None:
    assert joined((span(1, 0, 2), span(2, 2, 4)), (span(2, 0, 3), span(5, 3, 4)), 4) == (span(1, 0, 2), span(2, 2, 7), span(5, 7, 8))
    assert joined((), (span(2, 0, 3),), 0) == (span(2, 0, 3),)
