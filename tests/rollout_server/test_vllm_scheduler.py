"""The engine's side of columns: rows are the slices that vLLM would have made, and nothing else of its answers changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from rollout_server.vllm_columns import HANDLE, MARK, rows_of
from rollout_server.vllm_scheduler import _Columns


class Vllms:
    """What vLLM's scheduler would do, as far as the mixin sees it: answers that were laid out, and what it was given."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.given = answers, None

    def add_request(self, request: Any) -> None: ...

    def _free_request(self, request: Any) -> tuple[None, None]:
        return None, None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        self.given = model_runner_output.logprobs
        for output in self.answers:
            if output.finish_reason is not None:
                self._free_request(SimpleNamespace(request_id=output.request_id))
        return {0: SimpleNamespace(outputs=self.answers)} if self.answers else {}


class Under(_Columns, Vllms):
    """The mixin over it."""


def wanting(name: str, handle: int | None) -> Any:
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=None if handle is None else {HANDLE: handle}, num_logprobs=0))


def drawn(logprobs: LogprobsLists | None, **index: int) -> Any:
    return SimpleNamespace(logprobs=logprobs, req_id_to_index=index)


def lists(values: list[float], starts: list[int] | None = None) -> LogprobsLists:
    """The sampled token's log-prob in the first column, an alternative's in the second."""
    table = np.array([[value, -9.0] for value in values], np.float32)
    return LogprobsLists(np.zeros(table.shape, np.int32), table, np.zeros(len(values), np.int32), starts)


def test_rows_hold_the_sampled_tokens_log_probs_by_the_workers_own_order() -> None:
    # c is row 0, a row 1, b row 2 in the workers' batch; the scheduler answers a, b, c
    scheduler = Under([EngineCoreOutput("a", [5]), EngineCoreOutput("b", [6], finish_reason=FinishReason.STOP), EngineCoreOutput("c", [7])])
    for name, handle in (("a", 1), ("b", 2), ("c", None)):
        scheduler.add_request(wanting(name, handle))
    answer = scheduler.update_from_output(None, drawn(lists([-0.3, -0.1, -0.2]), c=0, a=1, b=2))[0]
    assert scheduler.given is None  # vLLM's own code had nothing to slice
    plain, carrier = answer.outputs
    assert plain.request_id == "c" and plain.new_logprobs.logprobs[0, 0] == np.float32(-0.3)
    assert carrier.request_id == MARK
    assert list(rows_of(*carrier.new_logprobs[:3])) == [(1, 5, float(np.float32(-0.1)), 0), (2, 6, float(np.float32(-0.2)), 1)]
    assert scheduler._headrace_handles == {"a": 1}  # b has ended


def test_several_tokens_of_one_request_are_found_by_its_start() -> None:
    # a drew 2 tokens (rows 0 and 1), b one (row 2), c none yet
    scheduler = Under([EngineCoreOutput("b", [9]), EngineCoreOutput("a", [5, 6], finish_reason=FinishReason.LENGTH)])
    for name, handle in (("a", 1), ("b", 2)):
        scheduler.add_request(wanting(name, handle))
    answer = scheduler.update_from_output(None, drawn(lists([-0.1, -0.2, -0.3], [0, 2, 3]), a=0, b=1))[0]
    assert [(handle, token, round(logprob, 3), end) for handle, token, logprob, end in rows_of(*answer.outputs[0].new_logprobs[:3])] == [
        (2, 9, -0.3, 0), (1, 5, -0.1, 0), (1, 6, -0.2, 2),
    ]  # fmt: skip


def test_an_end_without_token_is_a_row_and_a_step_without_output_stays_empty() -> None:
    scheduler = Under([EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR)])
    scheduler.add_request(wanting("a", 4))
    answer = scheduler.update_from_output(None, drawn(None, a=0))[0]
    assert [(handle, token, end) for handle, token, _, end in rows_of(*answer.outputs[0].new_logprobs[:3])] == [(4, -1, 4)]
    assert Under([]).update_from_output(None, drawn(None)) == {}


def test_a_token_without_log_prob_is_never_made_up() -> None:
    scheduler = Under([EngineCoreOutput("a", [5])])
    scheduler.add_request(wanting("a", 4))
    with pytest.raises(AssertionError, match="gave no log-probs"):
        scheduler.update_from_output(None, drawn(None, a=0))


def test_what_travels_is_read_as_it_was_sent() -> None:
    """Through vLLM's own encoder and decoder, small (inline) and large (beside the message)."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    for count in (1, 300):
        scheduler = Under([EngineCoreOutput(f"r{i}", [i]) for i in range(count)])
        for i in range(count):
            scheduler.add_request(wanting(f"r{i}", 1000 + i))
        values = [-i / 7 for i in range(count)]
        outputs = scheduler.update_from_output(None, drawn(lists(values), **{f"r{i}": i for i in range(count)}))[0].outputs
        read = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs)))
        assert list(rows_of(*read.outputs[0].new_logprobs[:3])) == [(1000 + i, i, float(np.float32(-i / 7)), 0) for i in range(count)]
