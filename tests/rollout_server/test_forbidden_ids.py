"""Ids without text are shut out in front of whichever sampler vLLM has; the logits of a prompt's own tokens pass it by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_server.worker import WorkerExtension

LOGITS = [[0.0, 1.0, 2.0, 9.0], [4.0, 3.0, 2.0, 9.0]]


class ModuleSampler(torch.nn.Module):
    """As of vLLM's first model runner."""

    def forward(self, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        assert sampling_metadata == "metadata"
        return logits.argmax(-1)


class PlainSampler:
    """As of its second: called whole, and it draws in `sample`."""

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        return self.sample(logits, sampling_metadata)

    def sample(self, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        assert sampling_metadata == "metadata"
        return logits.argmax(-1)


def a_worker(sampler: Any) -> WorkerExtension:
    worker = WorkerExtension()
    worker.device, worker.model_runner = torch.device("cpu"), SimpleNamespace(sampler=sampler)
    return worker


@pytest.mark.parametrize("sampler", [ModuleSampler(), PlainSampler()])
@pytest.mark.parametrize("named", [False, True])
def test_a_forbidden_id_is_not_drawn_though_it_is_the_likeliest(sampler: Any, named: bool) -> None:
    worker = a_worker(sampler)
    worker.headrace_forbid([3])
    logits = torch.tensor(LOGITS)
    drawn = sampler(logits=logits, sampling_metadata="metadata") if named else sampler(logits, "metadata")
    assert drawn.tolist() == [2, 0]
    assert torch.log_softmax(logits, -1)[0, 2].item() == pytest.approx(-0.407606, abs=1e-6)  # of [0, 1, 2]: the forbidden one has no share


def test_a_worker_that_draws_nothing_needs_no_sampler() -> None:
    a_worker(None).headrace_forbid([3])
