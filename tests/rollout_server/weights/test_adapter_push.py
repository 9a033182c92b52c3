"""Both ways of pushing a LoRA adapter, to a real vLLM engine: alone and merged they are the same weights, to the last bit."""

from __future__ import annotations

import asyncio
import copy
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from learner.weights.sender import OpenSnapshot, Sender
from learner.weights.snapshot import Snapshot, SnapshotWriter
from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from rollout_server.config import RolloutConfig
from rollout_server.vllm_engine import VllmEngine
from tests.rollout_server import reference
from tests.rollout_server.reference import Sample, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [10 + i % 200 for i in range(40)]


def adapted(folder: Path) -> Any:
    """The tiny model under an adapter that is not zero."""
    torch.manual_seed(3)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model


def written(model: Any, root: Path, lora: Literal["adapter", "merged"]) -> Snapshot:
    return SnapshotWriter(model, root=root, incarnation=1, served_dtype="float32", bucket_bytes=30_000, lora=lora).write(0)


async def push(engine: VllmEngine, snapshot: Snapshot, version: int) -> int:
    """Over gloo, committed; the bytes that went over."""
    manifest = manifest_pb2.Manifest.FromString((snapshot.folder / "manifest.bin").read_bytes())
    manifest.version = version
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    spec = learner_pb2.GroupSpec(transport=learner_pb2.TRANSPORT_GLOO, store_host="127.0.0.1", store_port=store.port, group_key=f"v{version}", num_owners=1, num_receivers=1, receiver_rank=1, collective_timeout_s=60.0)
    sender = Sender(0, torch.device("cpu"), threading.Event())
    sending = asyncio.create_task(asyncio.to_thread(sender.send, [spec], version, OpenSnapshot(snapshot), deadline_s=120.0))
    await engine.receive(spec.SerializeToString(), manifest.SerializeToString(), 120.0)
    sent_bytes, _ = await sending
    sender.close()
    await engine.commit(version)
    return sent_bytes


async def test_an_adapter_pushed_alone_and_merged_draws_the_same_and_what_peft_would(tiny_model: Path, tmp_path: Path) -> None:
    model = adapted(tiny_model)
    whole = copy.deepcopy(model).merge_and_unload().eval()
    engine = VllmEngine(RolloutConfig(model=str(tiny_model), max_model_len=256, max_num_seqs=8, kv_cache_bytes=64 << 20, threads=1), tiny_model)
    await engine.start()
    try:
        base = await Sample(engine, PROMPT, "base", temperature=1.0, max_new_tokens=32, seed=5).task
        drawn = {}
        ways: list[Literal["adapter", "merged"]] = ["adapter", "merged", "adapter"]
        for version, lora in enumerate(ways, start=1):
            sent = await push(engine, written(model, tmp_path / f"{version}", lora), version)
            drawn[version] = (sent, await Sample(engine, PROMPT, f"v{version}", temperature=1.0, max_new_tokens=32, seed=5).task)
    finally:
        await engine.stop()
    # faults.md 7, 8: the adapter counts, once, also where one follows a merged push
    for _, sample in drawn.values():
        assert largest_difference(sample.logprobs, reference.logprobs(whole, PROMPT, sample.ids)) < 1e-4
        assert (sample.ids, sample.logprobs) == (drawn[1][1].ids, drawn[1][1].logprobs)
    assert largest_difference(base.logprobs, reference.logprobs(whole, PROMPT, base.ids)) > 0.05
    assert drawn[1][0] == drawn[3][0] < 0.2 * drawn[2][0]  # bytes on the way
