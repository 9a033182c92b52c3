"""A replica of two tensor-parallel workers takes its weights by the push: each worker joins the group and keeps its own parts."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from learner.weights.sender import OpenSnapshot, Sender
from learner.weights.snapshot import SnapshotWriter
from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from rollout_server.config import RolloutConfig
from rollout_server.vllm_engine import VllmEngine
from tests.rollout_server import reference
from tests.rollout_server.reference import Sample, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PROMPT = [10 + i % 200 for i in range(70)]
BUCKET_BYTES = 40_000


async def test_two_workers_receive_their_own_parts_and_draw_what_transformers_would(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    other = reference.perturbed(tiny_model, tmp_path / "other", seed=1)
    writer = SnapshotWriter(AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32), root=tmp_path / "shm", incarnation=1, served_dtype="float32", bucket_bytes=BUCKET_BYTES)
    snapshot = writer.write(1)
    manifest = manifest_pb2.Manifest.FromString((snapshot.folder / "manifest.bin").read_bytes())
    manifest.version = 1
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    spec = learner_pb2.GroupSpec(
        transport=learner_pb2.TRANSPORT_GLOO, store_host="127.0.0.1", store_port=store.port, group_key="tp", num_owners=1, num_receivers=2,
        receivers=["a worker 0", "a worker 1"], collective_timeout_s=120.0,
    )  # fmt: skip
    config = RolloutConfig(model=str(tiny_model), max_model_len=256, max_num_seqs=8, kv_cache_bytes=64 << 20, threads=1, tensor_parallel=2)
    engine = VllmEngine(config, tiny_model)
    await engine.start()
    try:
        assert engine.info.worker_device_uuids == ("", "") and "packs its weights" in engine.apply_reason
        sender = Sender(0, torch.device("cpu"), threading.Event())
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(sender.send, [spec], 1, OpenSnapshot(snapshot), deadline_s=240.0)
            to_replica = learner_pb2.GroupSpec()
            to_replica.CopyFrom(spec)
            to_replica.receiver_rank = 1
            await engine.receive(to_replica.SerializeToString(), manifest.SerializeToString(), 240.0)
            sent_bytes, sender_peak = await asyncio.wrap_future(sending)
        peaks = await engine._rpc("headrace_peak_bytes", timeout_s=30.0)
        print({"model_bytes": snapshot.total_bytes, "sender_peak_bytes": sender_peak, "receiver_peak_bytes": peaks})
        assert sent_bytes == snapshot.total_bytes and sender_peak <= BUCKET_BYTES
        # Half of every matrix, all of the norms, two buckets; the vocabulary of 259 is padded to 320, 160 rows a worker.
        assert all(peak < 0.66 * snapshot.total_bytes + 2 * BUCKET_BYTES for peak in peaks)
        await engine.commit(1)
        sample = await Sample(engine, PROMPT, "tp", temperature=1.0, max_new_tokens=48, seed=3).task
        assert largest_difference(sample.logprobs, reference.logprobs(reference.load(other), PROMPT, sample.ids)) < 1e-4
    finally:
        await engine.stop()
