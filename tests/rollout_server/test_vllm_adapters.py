"""An adapter is served and replaced as an adapter by a whole server on real vLLM, and draws what peft would."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.weights.snapshot import SnapshotWriter
from protos import rpc
from protos.arrays import pack_ids
from protos.manifest.v1alpha1 import manifest_pb2
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2
from protos.weights.folder import Place, publish
from rollout_server.config import RolloutConfig
from rollout_server.service import Service
from rollout_server.vllm_engine import VllmEngine
from tests.learner.weights.test_lora import adapted
from tests.rollout_server import reference
from tests.system.soak.clients import whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [10 + i % 200 for i in range(70)]


def published(model: Any, place: Place, root: Path, version: int) -> int:
    """What a learner does after a step with `push.lora: adapter`; the bytes that were published."""
    made = SnapshotWriter(model, root=root / str(version), incarnation=1, served_dtype="float32", bucket_bytes=100_000, lora="adapter").write(version)
    manifest = manifest_pb2.Manifest.FromString((made.folder / "manifest.bin").read_bytes())
    manifest.version = version
    publish(place, made.folder, manifest)
    return made.total_bytes


async def test_an_adapter_is_served_and_updated_through_the_service(tiny_model: Path, tmp_path: Path) -> None:
    model, place = adapted(tiny_model), Place(str(tmp_path / "shared"))
    config = RolloutConfig(
        model=str(tiny_model), max_model_len=256, max_num_seqs=8, kv_cache_bytes=64 << 20, threads=1, weights_folder=str(tmp_path / "shared"),
        mirror_dir=str(tmp_path / "mirrors"),
    )  # fmt: skip
    service = Service(config, tiny_model, VllmEngine(config, tiny_model))
    serving = asyncio.create_task(service.serve())
    try:
        async with asyncio.timeout(120):
            while not service.replica.life:
                assert not serving.done(), serving.exception()
                await asyncio.sleep(0.1)
        async with rpc.channel(service.address) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            for version in (1, 2):
                num_bytes = published(model, place, tmp_path / "shm", version)
                assert num_bytes < sum(p.numel() for p in model.parameters()) * 4 / 3
                async with asyncio.timeout(60):
                    while service.replica.engine.loaded_version < version:
                        await asyncio.sleep(0.1)
                request = pb.GenerateRequest(prompt_ids=pack_ids(PROMPT), sampling=trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=40, seed=version))
                answer = await whole(stub, request)
                trained = copy.deepcopy(model).merge_and_unload().eval()
                assert [(span.version, span.start, span.end) for span in answer.last.spans] == [(version, 0, 40)]
                assert reference.largest_difference(answer.logprobs, reference.logprobs(trained, PROMPT, answer.ids)) < 1e-4
                base = reference.logprobs(reference.load(tiny_model), PROMPT, answer.ids)
                assert reference.largest_difference(answer.logprobs, base) > 1e-2  # the adapter is there
                with torch.no_grad():  # the next step of training
                    for name, parameter in model.named_parameters():
                        if "lora_B" in name:
                            parameter.mul_(-0.5)
    finally:
        service.stop()
        await asyncio.wait_for(serving, 60)
