"""One FSDP2 trainer rank of test_covering.py: python covering_rank.py RANK WORLD INIT_FILE

Answers lines on stdin with one JSON line each:
    load FOLDER ROOT    the model, sharded; {"parameters": N}
    write V             a snapshot as version V; {"manifest": hex, "num_bytes", "total_bytes"}
    send SPEC V         that snapshot to the receivers of a GroupSpec (hex); {"sent_bytes", "peak_bytes", "error"}
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from learner.weights.sender import OpenSnapshot, Sender
from learner.weights.snapshot import Snapshot, SnapshotWriter
from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError

BUCKET_BYTES = 100_000


class Rank:
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.mesh, self.incarnation = rank, init_device_mesh("cpu", (world,)), 0
        self.sender = Sender(rank, torch.device("cpu"), threading.Event())
        self.snapshot: Snapshot | None = None

    def load(self, folder: str, root: str) -> dict[str, Any]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        self.incarnation += 1
        self.writer = SnapshotWriter(model, root=Path(root), incarnation=self.incarnation, served_dtype="float32", bucket_bytes=BUCKET_BYTES)
        return {"parameters": len(list(model.parameters()))}

    def write(self, version: str) -> dict[str, Any]:
        self.snapshot = snapshot = self.writer.write(int(version))
        dist.barrier()
        manifest = manifest_pb2.Manifest.FromString((snapshot.folder / "manifest.bin").read_bytes())
        manifest.version = int(version)
        return {"manifest": manifest.SerializeToString().hex(), "num_bytes": snapshot.num_bytes, "total_bytes": snapshot.total_bytes}

    def send(self, spec: str, version: str) -> dict[str, Any]:
        assert self.snapshot is not None
        error = ""
        try:
            self.sender.send([learner_pb2.GroupSpec.FromString(bytes.fromhex(spec))], int(version), OpenSnapshot(self.snapshot), deadline_s=120.0)
        except TransferError as failure:
            error = str(failure)
        return {"sent_bytes": self.sender.sent_bytes, "peak_bytes": self.sender.peak_bytes, "error": error}


def main() -> None:
    rank, world, init_file = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=int(rank), world_size=int(world))
    served = Rank(int(rank), int(world))
    for line in sys.stdin:
        name, *arguments = line.split()
        print(json.dumps(getattr(served, name)(*arguments)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
