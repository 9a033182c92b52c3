"""A trainer rank reduced to its weights, for benchmarks and scripts on a GPU: python -m benchmarks._update_trainer MODEL ROOT DEVICE TRANSPORT

Answers lines on stdin with one JSON line each:
    move SEED         moves every weight a little, as an optimizer would; {"moved": true}
    write [SEED]      moves every weight where a seed is given, writes the snapshot; {"version", "manifest" (hex), "store_port", "num_bytes", "write_s", "spans"}
    send              sends the last version to one receiver by TRANSPORT; {"sent_bytes", "seconds", "error", "spans"}
    logprobs IDS      log-probs of a prompt (comma-separated ids) under the last version, in the served dtype; {"logprobs"}
    spans: pieces as (name, began, ended) on this machine's monotonic clock (protos/weights/marks.py)
    copy              one flat copy of a version's bytes on the device, the median of 20; {"copy_s"}
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from learner.weights.sender import OpenSnapshot, Sender
from learner.weights.snapshot import Snapshot, SnapshotWriter
from protos import stacks
from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import marks
from protos.weights.errors import TransferError

TRANSPORTS = {"gloo": learner_pb2.TRANSPORT_GLOO, "nccl": learner_pb2.TRANSPORT_NCCL, "ipc": learner_pb2.TRANSPORT_IPC}
TIMEOUT_S = 30.0


def spec_of(transport: str, store_port: int, *, num_receivers: int = 1, receiver_rank: int = 0, key: str = "1") -> learner_pb2.GroupSpec:
    """The one group of trainer rank 0 and its receivers on this machine."""
    return learner_pb2.GroupSpec(
        transport=TRANSPORTS[transport], store_host="127.0.0.1", store_port=store_port, group_key=key, num_owners=1, num_receivers=num_receivers,
        receiver_rank=receiver_rank, collective_timeout_s=TIMEOUT_S,
    )  # fmt: skip


class Trainer:
    def __init__(self, model: Path, root: Path, device: torch.device, transport: str, bucket_bytes: int) -> None:
        from transformers import AutoModelForCausalLM

        self._device, self._transport = device, transport
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()
        self._writer = SnapshotWriter(self._model, root=root, incarnation=1, served_dtype="bfloat16", bucket_bytes=bucket_bytes)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        self._sender = Sender(0, device, threading.Event())
        self._version = 0
        self._snapshot: Snapshot | None = None

    def move(self, seed: str) -> dict[str, Any]:
        generator = torch.Generator(self._device).manual_seed(int(seed))
        with torch.no_grad():
            for parameter in self._model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=self._device, dtype=torch.float32)
                parameter.add_((0.02 * parameter.float().std().clamp_min(1e-3) * noise).to(parameter.dtype))
        self._synchronize()
        return {"moved": True}

    def write(self, seed: str = "") -> dict[str, Any]:
        if seed:
            self.move(seed)
        self._version += 1
        marks.taken()
        with marks.span("snapshot"):
            self._snapshot = self._writer.write(self._version)
        manifest = manifest_pb2.Manifest.FromString((self._snapshot.folder / "manifest.bin").read_bytes())
        manifest.version = self._version
        return {
            "version": self._version, "manifest": manifest.SerializeToString().hex(), "store_port": self._store.port, "num_bytes": self._snapshot.total_bytes,
            "write_s": self._snapshot.seconds, "spans": marks.taken(),
        }  # fmt: skip

    def send(self) -> dict[str, Any]:
        assert self._snapshot is not None, "write comes before send"
        began, error = time.monotonic(), ""
        try:
            self._sender.send([spec_of(self._transport, self._store.port)], self._version, OpenSnapshot(self._snapshot), deadline_s=2 * TIMEOUT_S)
        except TransferError as failure:
            error = str(failure)
        return {"sent_bytes": self._sender.sent_bytes, "seconds": time.monotonic() - began, "error": error, "spans": marks.taken()}

    def logprobs(self, ids: str) -> dict[str, Any]:
        tokens = torch.tensor([[int(token) for token in ids.split(",")]], device=self._device)
        with torch.inference_mode():
            values = torch.log_softmax(self._model(tokens).logits[0].float(), -1)
        return {"logprobs": values[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()}

    def copy(self) -> dict[str, Any]:
        num_bytes = sum(parameter.numel() * torch.bfloat16.itemsize for parameter in self._model.parameters())
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self._device)
        target, seconds = torch.empty_like(source), []
        for _ in range(20):
            self._synchronize()
            began = time.perf_counter()
            target.copy_(source)
            self._synchronize()
            seconds.append(time.perf_counter() - began)
        return {"copy_s": statistics.median(seconds)}

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main() -> None:
    model, root, device, transport, bucket_mib = sys.argv[1:]
    stacks.answering()
    on = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    trainer = Trainer(Path(model), Path(root), on, transport, int(bucket_mib) << 20)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name, _, argument = line.strip().partition(" ")
        answer = getattr(trainer, name)(*filter(None, [argument]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
