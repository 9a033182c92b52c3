"""What is asked of vLLM for one completion, and what is read of its answer; no engine is started."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_server import vllm_setup
from rollout_server.engine import EngineUnavailableError, SamplingSpec
from rollout_server.spans import SpanTrack
from rollout_server.vllm_engine import VllmEngine

vllm = pytest.importorskip("vllm")


def flat(positions: Sequence[dict[int, float]]) -> Any:
    """vLLM's own container of these positions."""
    from vllm.logprobs import FlatLogprobs, Logprob

    made = FlatLogprobs()
    made.extend([{token: Logprob(logprob=value) for token, value in position.items()} for position in positions])
    return made


def engine_with(track: str) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine._tracks = {track: SpanTrack(1)}
    return engine


@pytest.mark.parametrize("ids", [[382], [13], [382, 13]])
@pytest.mark.parametrize("order", [(382, 13), (13, 382)])
def test_the_log_prob_is_that_of_the_drawn_token_whatever_stands_first_in_the_map(ids: list[int], order: tuple[int, int]) -> None:
    # faults.md 43: {382: -4.20, 13: -0.70}
    values = {382: -4.20, 13: -0.70}
    completion = SimpleNamespace(logprobs=flat([{token: values[token] for token in order}] * len(ids)), finish_reason=None)
    assert engine_with("r#0")._delta(completion, ids, len(ids), "r#0").logprobs == [values[token] for token in ids]


def test_one_entry_a_position_is_read_as_it_stands_and_what_is_missing_is_the_engines_fault() -> None:
    ids = [5, 6, 5]
    assert vllm_setup.sampled_logprobs(flat([{5: -1.0}, {6: -2.0}, {5: -3.0}]), ids) == [-1.0, -2.0, -3.0]
    assert vllm_setup.sampled_logprobs(flat([{5: -1.0}]), []) == []  # vLLM 0.26 gives all positions where none are new
    for found in (None, flat([{5: -1.0}]), flat([{5: -1.0}, {7: -2.0}, {5: -3.0}])):
        with pytest.raises(EngineUnavailableError, match="log-probs"):
            vllm_setup.sampled_logprobs(found, ids)


def test_neutral_parameters_are_stated_and_prompt_log_probs_are_never_asked_for() -> None:
    # faults.md 42: what the model's generation_config says has no place left to go; 44: no value is read from cached prompt positions
    asked = vllm_setup.request_parameters(SamplingSpec(temperature=0.6, max_new_tokens=4, seed=7), 100, False)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) == (0.6, 1.0, 0, 0.0, 1.0, 0.0, 0.0)
    assert asked.prompt_logprobs is None and asked.seed == 7 and asked.logprobs is not None and asked.flat_logprobs
