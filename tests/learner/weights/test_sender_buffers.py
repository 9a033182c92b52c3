"""Which buckets of a device a sender keeps."""

from __future__ import annotations

import threading

import torch

from learner.weights.sender import Sender
from protos.learner.v1alpha1 import learner_pb2

GLOO, NCCL, IPC = (learner_pb2.GroupSpec(transport=kind) for kind in (learner_pb2.TRANSPORT_GLOO, learner_pb2.TRANSPORT_NCCL, learner_pb2.TRANSPORT_IPC))


def addresses(buffers: list[torch.Tensor]) -> list[int]:
    return [buffer.data_ptr() for buffer in buffers]


def test_buckets_that_receivers_have_opened_are_used_again_until_they_are_too_small_or_the_groups_end() -> None:
    # torch keeps shared memory for as long as a receiver has it open: buffers made anew for each version would never be freed.
    sender = Sender(0, torch.device("cpu"), threading.Event())
    first = sender._buffers([IPC], 100)
    assert addresses(sender._buffers([IPC, GLOO], 80)) == addresses(first) and sender.peak_bytes == 160
    larger = sender._buffers([IPC], 101)
    assert [buffer.numel() for buffer in larger] == [101, 101] and sender._shared is larger
    sender.close()
    assert sender._shared == []


def test_nothing_is_kept_for_transports_that_open_nothing() -> None:
    sender = Sender(0, torch.device("cpu"), threading.Event())
    assert sender._buffers([GLOO], 100) == [] and sender.peak_bytes == 100
    assert [buffer.numel() for buffer in sender._buffers([NCCL, GLOO], 100)] == [100, 100] and sender.peak_bytes == 200 and sender._shared == []
