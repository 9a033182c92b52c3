"""The cells of test_matrix.py over real gloo: senders and receivers as the trainer's ranks and the replicas have them, in threads.

    pytest -m slow -s tests/learner/weights/test_matrix_pushed.py       prints every cell with the bytes held at once
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from learner.weights.sender import OpenSnapshot, Sender
from learner.weights.snapshot import Snapshot
from protos.learner.v1alpha1 import learner_pb2
from protos.weights.blocks import whole_part
from protos.weights.layout import engine_of
from protos.weights.receiver import Receiver
from tests.learner.weights.test_matrix import (
    BUCKET_BYTES,
    MODELS,
    RANKS,
    REPLICAS,
    check,
    cut,
    engines_of,
    keep_of,
    manifest_with_digests,
    model,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 120.0


@pytest.mark.parametrize(("num_ranks", "num_replicas"), list(product(RANKS, REPLICAS)))
def test_every_model_reaches_every_replica_of_one_membership(num_ranks: int, num_replicas: int, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
    num_workers = len(engines_of(model("llama", True)[1], num_replicas))
    kept: list[Any] = [None] * num_workers  # of the model that is pushed, by worker
    receivers = [Receiver(keep=lambda *tensor, number=number: kept[number](*tensor) if kept[number] else whole_part(tensor[1], tensor[2])) for number in range(num_workers)]
    senders = [Sender(rank, torch.device("cpu"), threading.Event()) for rank in range(num_ranks)]
    specs = [
        learner_pb2.GroupSpec(
            transport=learner_pb2.TRANSPORT_GLOO, store_host="127.0.0.1", store_port=store.port, group_key="one", num_owners=num_ranks, num_receivers=num_workers, receiver_rank=number + 1,
            collective_timeout_s=LIMIT_S,
        )
        for number in range(num_workers)
    ]  # fmt: skip
    ran = []
    with ThreadPoolExecutor(num_ranks + num_workers) as pool:
        for version, (family, tied) in enumerate(product(MODELS, (True, False)), start=1):
            named, config = model(family, tied)
            alone, engines = engine_of(config), engines_of(config, num_replicas)
            kept[:] = [keep_of(engine) if engine else None for engine in engines]
            plan, files = cut(named, num_ranks)
            folder = tmp_path / str(version)
            folder.mkdir()
            for rank, data in enumerate(files):
                (folder / f"rank-{rank}.bin").write_bytes(data)
            manifest = manifest_with_digests(plan, files)
            manifest.version = version
            taking = [pool.submit(receiver.receive, spec, manifest, timeout_s=LIMIT_S) for receiver, spec in zip(receivers, specs, strict=True)]
            opened = [OpenSnapshot(Snapshot(folder=folder, policy_step=version, rank=rank, num_bytes=0, total_bytes=0, seconds=0.0, plan=plan)) for rank in range(num_ranks)]
            sending = [pool.submit(sender.send, specs[:1], version, snapshot, deadline_s=LIMIT_S) for sender, snapshot in zip(senders, opened, strict=True)]
            sent = [future.result(2 * LIMIT_S) for future in sending]
            assert alone is not None and sum(num_bytes for num_bytes, _ in sent) == plan.total_bytes and max(peak for _, peak in sent) <= BUCKET_BYTES
            for engine, future, receiver in zip(engines, taking, receivers, strict=True):
                staging = future.result(2 * LIMIT_S)
                check(named, plan, staging, engine, alone)
                assert receiver.peak_bytes <= staging.num_bytes + 2 * BUCKET_BYTES
            ran.append((family, tied))
            peaks = f"at most {max(peak for _, peak in sent)} at a rank, {max(receiver.peak_bytes for receiver in receivers)} at a receiver"
            print(f"{family} {'tied' if tied else 'untied'} {num_ranks} x {num_replicas}: {plan.total_bytes} bytes to {num_workers} workers; held at once {peaks}")
    assert ran == list(product(MODELS, (True, False)))
    ends: list[Sender | Receiver] = [*senders, *receivers]
    for end in ends:
        end.close()
