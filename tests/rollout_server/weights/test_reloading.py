"""A loader that cannot take the same bytes again is found out at start, and the weights are what they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protos.weights.errors import TransferError
from rollout_server.weights.reloading import changed_by, packs_experts
from rollout_server.worker import WorkerExtension


class FusedExperts(nn.Module):
    """Two experts in one parameter, stored as the kernel wants it: transposed by `pack`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(18.0).reshape(2, 3, 3))
        self.register_buffer("scale", torch.ones(2))

    def pack(self) -> None:
        self.weight.data.copy_(self.weight.data.transpose(1, 2).clone())


def model() -> tuple[nn.Sequential, FusedExperts]:
    experts = FusedExperts()
    return nn.Sequential(nn.Linear(3, 3), experts), experts


def test_a_loader_that_packs_what_is_packed_is_named_and_everything_put_back() -> None:
    # faults.md 10: a second packing of packed weights, without an error
    net, experts = model()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert changed_by(experts.pack, net) == "1.weight"
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_loader_that_brings_the_same_bytes_or_a_parameter_of_another_object_passes() -> None:
    net, experts = model()

    def reload() -> None:
        experts.weight = nn.Parameter(experts.weight.detach().clone())

    assert changed_by(reload, net) == "" and changed_by(lambda: None, net) == ""


def test_a_parameter_that_is_gone_or_of_another_shape_is_a_change() -> None:
    net, experts = model()
    assert changed_by(lambda: delattr(experts, "scale"), net) == "1.scale"
    net, experts = model()

    def reshaped() -> None:
        experts.weight = nn.Parameter(torch.zeros(18))

    assert changed_by(reshaped, net) == "1.weight"


def test_only_models_with_experts_are_loaded_twice() -> None:
    assert packs_experts(model()[0]) and not packs_experts(nn.Sequential(nn.Linear(3, 3)))


def test_a_worker_that_cannot_take_its_experts_again_refuses_every_way_of_an_update() -> None:
    extension = WorkerExtension()
    extension.device = torch.device("cpu")
    extension._headrace_refusal = "loading the same files once more changed 1.weight"
    refusal = r"changed 1.weight; the old weights stay"
    with pytest.raises(TransferError, match=refusal):
        extension.headrace_begin_receive(b"", b"", 1.0)
    with pytest.raises(TransferError, match=refusal):
        extension.headrace_begin_folder("f", b"")
    with pytest.raises(TransferError, match=refusal):
        extension.headrace_begin_chunks(b"")
