"""What is asked of vLLM for one completion, and what is read of its answer; no engine is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout_server import vllm_setup
from rollout_server.engine import SamplingSpec
from rollout_server.vllm_drawing import part_of

vllm = pytest.importorskip("vllm")


@pytest.mark.parametrize("ids", [[382], [13], [382, 13]])
@pytest.mark.parametrize("order", [(382, 13), (13, 382)])
def test_the_log_prob_is_that_of_the_drawn_token_whatever_stands_first_in_the_map(ids: list[int], order: tuple[int, int]) -> None:
    # faults.md 43: {382: -4.20, 13: -0.70}
    values = {382: -4.20, 13: -0.70}
    answered = {token: SimpleNamespace(logprob=values[token]) for token in order}
    completion = SimpleNamespace(token_ids=ids, logprobs=[answered] * len(ids), finish_reason=None)
    assert part_of(completion) == (ids, [values[token] for token in ids], None)


def test_neutral_parameters_are_stated_and_prompt_log_probs_are_never_asked_for() -> None:
    # faults.md 42: what the model's generation_config says has no place left to go; 44: no value is read from cached prompt positions
    asked = vllm_setup.request_parameters(SamplingSpec(temperature=0.6, max_new_tokens=4, seed=7), 100, False)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) == (0.6, 1.0, 0, 0.0, 1.0, 0.0, 0.0)
    assert asked.prompt_logprobs is None and asked.seed == 7 and asked.logprobs is not None


def test_a_process_that_ends_while_vllm_kills_it_is_no_failure_of_the_stop() -> None:  # faults.md 128
    class NoSuchProcess(Exception):
        """Named as the one of psutil."""

    def fails(error: Exception) -> SimpleNamespace:
        def shutdown() -> None:
            raise error

        return SimpleNamespace(shutdown=shutdown)

    vllm_setup.shut_down(fails(NoSuchProcess("process no longer exists (pid=28458)")))
    with pytest.raises(RuntimeError, match="something else"):
        vllm_setup.shut_down(fails(RuntimeError("something else")))
