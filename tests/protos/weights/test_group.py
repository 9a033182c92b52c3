"""Groups over real gloo: what is missing, stopped or cancelled becomes a TransferError in time, and the process goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from protos.weights import backends
from protos.weights.errors import TransferError
from protos.weights.group import GroupAddress, TransferGroup

ROOT = Path(__file__).resolve().parents[3]
ROLES = ["trainer rank 0", "receiver 1"]

PEER = """
import sys, torch
from protos.weights.group import GroupAddress, TransferGroup
host, port, key = sys.argv[1:]
group = TransferGroup.connect(GroupAddress(transport="gloo", host=host, port=int(port), key=key), rank=1, roles=["trainer rank 0", "receiver 1"], timeout_s=30)
while True:
    data = torch.zeros(64 << 20, dtype=torch.uint8)
    group.broadcast(data, what="bucket", timeout_s=60)
    print(int(data[-1]), flush=True)
"""


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def address(store: dist.TCPStore, key: str) -> GroupAddress:
    return GroupAddress(transport="gloo", host="127.0.0.1", port=store.port, key=key)


def exchange(store: dist.TCPStore, key: str) -> list[int]:
    """A group of two threads that passes eight bytes; what arrived."""
    where, arrived = address(store, key), torch.zeros(8, dtype=torch.uint8)

    def sender() -> None:
        group = TransferGroup.connect(where, rank=0, roles=ROLES, timeout_s=10)
        group.broadcast(torch.arange(8, dtype=torch.uint8), what="bucket 0", timeout_s=10)
        group.close()

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender)
        group = TransferGroup.connect(where, rank=1, roles=ROLES, timeout_s=10)
        group.broadcast(arrived, what="bucket 0", timeout_s=10)
        sent.result()
    group.close()
    return arrived.tolist()


def test_bytes_pass_and_groups_can_be_made_one_after_the_other(store: dist.TCPStore) -> None:
    assert exchange(store, "1") == exchange(store, "2") == list(range(8))


def test_a_peer_that_never_appears_is_named_by_the_deadline_and_a_new_group_works_right_after(store: dist.TCPStore) -> None:
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"gloo group lonely, connecting: receiver 1 did not appear in time; this is rank 0 \(trainer rank 0\)"):
        TransferGroup.connect(address(store, "lonely"), rank=0, roles=ROLES, timeout_s=1.0)
    assert 0.9 < time.monotonic() - began < 20
    assert exchange(store, "after") == list(range(8))  # faults.md 22, 23


def test_a_store_that_is_not_there_is_an_error_by_the_deadline() -> None:
    began = time.monotonic()
    where = GroupAddress(transport="gloo", host="127.0.0.1", port=1, key="nowhere")
    with pytest.raises(TransferError, match="group nowhere, connecting"):
        TransferGroup.connect(where, rank=1, roles=ROLES, timeout_s=1.0)
    assert time.monotonic() - began < 20


def test_cancelling_ends_a_wait_long_before_its_deadline(store: dist.TCPStore) -> None:
    cancelled, began = threading.Event(), time.monotonic()
    threading.Timer(0.3, cancelled.set).start()
    with pytest.raises(TransferError, match="cancelled"):
        TransferGroup.connect(address(store, "cancelled"), rank=0, roles=ROLES, timeout_s=30.0, cancelled=cancelled)
    assert time.monotonic() - began < 15


def test_a_process_that_gave_a_group_up_exits_in_good_order() -> None:
    script = """
import threading, torch.distributed as dist
from protos.weights.errors import TransferError
from protos.weights.group import GroupAddress, TransferGroup
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
cancelled = threading.Event()
cancelled.set()
try:
    TransferGroup.connect(GroupAddress(transport="gloo", host="127.0.0.1", port=store.port, key="k"), rank=0, roles=["a", "b"], timeout_s=60, cancelled=cancelled)
except TransferError:
    print("given up", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=40, check=False)
    assert (run.stdout, run.returncode) == ("given up\n", 0), run.stderr


def test_a_closed_group_refuses_at_once(store: dist.TCPStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(TransferGroup.connect, address(store, "closed"), rank=1, roles=ROLES, timeout_s=10)
        group = TransferGroup.connect(address(store, "closed"), rank=0, roles=ROLES, timeout_s=10)
        other.result().close()
    group.close()
    group.close()
    with pytest.raises(TransferError, match="is closed"):
        group.broadcast(torch.zeros(8, dtype=torch.uint8), what="bucket 0", timeout_s=10)


def send_twice(group: TransferGroup, data: torch.Tensor) -> None:
    for _ in range(2):
        group.broadcast(data, what="bucket 1", timeout_s=1.5)


@pytest.fixture
def peer(store: dist.TCPStore) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PEER, "127.0.0.1", str(store.port), "peer"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_receiver_stopped_or_killed_mid_push_costs_one_deadline_at_most(store: dist.TCPStore, peer: subprocess.Popen[str], signal_number: int) -> None:
    group = TransferGroup.connect(address(store, "peer"), rank=0, roles=ROLES, timeout_s=40)
    data = torch.full((64 << 20,), 5, dtype=torch.uint8)
    group.broadcast(data, what="bucket 0", timeout_s=20)
    assert peer.stdout is not None and peer.stdout.readline() == "5\n"
    peer.send_signal(signal_number)
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"gloo group peer, bucket 1: .*its peers are receiver 1; the group is given up"):
        send_twice(group, data)  # a killed peer's socket may take a first bucket
    assert time.monotonic() - began < 15  # a broadcast before had 20 s
    assert group.closed
    assert exchange(store, "next") == list(range(8))


def test_what_is_made_while_the_group_is_given_up_is_given_back(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # `close` gives back what there is then; a communicator that comes into being after it would live as long as the process.
    making, go_on, given_back = threading.Event(), threading.Event(), threading.Event()
    made = object()

    class Slow:
        def __init__(self, *_: object) -> None:
            pass

        def whole(self, *_: object) -> None:
            return None

        def part(self, *_: object) -> object:
            making.set()
            go_on.wait(60)
            return made

    def abort(backend: object) -> None:
        assert backend is made
        given_back.set()

    monkeypatch.setitem(backends.WIRES, "gloo", Slow)
    monkeypatch.setattr(backends, "abort", abort)
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(TransferGroup.connect, address(store, "late"), rank=0, roles=ROLES[:1], timeout_s=60, cancelled=cancelled)
        assert making.wait(60)
        cancelled.set()
        with pytest.raises(TransferError, match="connecting: cancelled"):
            joining.result(60)
    go_on.set()
    assert given_back.wait(60)
