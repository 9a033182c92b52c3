"""The probe is what transformers computes at temperature 1, whatever the run samples at, and travels in the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from learner.trainer.model import load_policy
from learner.trainer.probe import Prober
from learner.weights.snapshot import SnapshotWriter
from protos.manifest.v1alpha1 import manifest_pb2


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_probe_of_a_version_is_its_log_probs_at_temperature_one(one_rank: None, tiny_model: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny_model, mesh=init_device_mesh("cpu", (1,)), compute_dtype=torch.float32, temperature=0.5)
    probe = Prober(policy, vocabulary=259, tolerance=0.02, device=torch.device("cpu"))()
    assert probe.token_ids[:3] == (1, 7920 % 259, 15839 % 259) and len(set(probe.token_ids)) == 32
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    ids = torch.tensor([probe.token_ids])
    with torch.inference_mode():
        expected = torch.log_softmax(model(ids).logits[0], -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(torch.tensor(probe.logprobs), expected, atol=1e-5)
    writer = SnapshotWriter(policy.causal_lm, root=tmp_path, incarnation=1, served_dtype="float32", bucket_bytes=1 << 20, verify="logprobs")
    sent = manifest_pb2.Manifest.FromString((writer.write(1, probe=probe).folder / "manifest.bin").read_bytes())
    assert sent.verify == manifest_pb2.VERIFY_LOGPROBS and list(sent.probe.token_ids) == list(probe.token_ids) and sent.probe.tolerance == pytest.approx(0.02)
