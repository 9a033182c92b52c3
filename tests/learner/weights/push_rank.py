"""One trainer rank of test_push.py: python push_rank.py RANK WORLD INIT_FILE GATEWAY MODEL ROOT

Answers commands on stdin with one JSON line each: "push V" writes version V (the model times V), spoils the weights, pushes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from learner.weights.push import Pusher
from learner.weights.snapshot import SnapshotWriter

INCARNATION = 11
BUCKET_BYTES = 20_000
GATHERED = 0


def counted(tensor: DTensor, *_: object, **__: object) -> torch.Tensor:
    global GATHERED
    GATHERED += 1
    return tensor.to_local()


def sharded(folder: str, world: int) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def scale(model: torch.nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().mul_(factor)


def main() -> None:
    rank, world, init_file, gateway, folder, root = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=int(rank), world_size=int(world))
    DTensor.full_tensor = counted  # type: ignore[method-assign, assignment]
    model = sharded(folder, int(world))
    writer = SnapshotWriter(model, root=Path(root), incarnation=INCARNATION, served_dtype="bfloat16", bucket_bytes=BUCKET_BYTES)
    pusher = Pusher(address=gateway, incarnation=INCARNATION, rank=int(rank), world_size=int(world), device=torch.device("cpu"), store_host="127.0.0.1", deadline_s=20.0)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        version = int(line.split()[1])
        scale(model, version)
        snapshot = writer.write(version)
        scale(model, 1 / version)  # the next optimizer update comes before the push
        dist.barrier()  # rank 0's manifest is there once the others' CloseBatch would have come back
        pusher.submit(version, snapshot)
        idle = pusher.wait_idle(60.0)
        numbers = dataclasses.asdict(pusher.metrics())
        print(json.dumps({**numbers, "idle": idle, "own_bytes": snapshot.num_bytes, "gathered": GATHERED}), flush=True)
    print(json.dumps({"closed": pusher.close(10.0)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
