"""The protocol of CUDA IPC in the store, with memory of this process in place of a GPU's; the real thing is tests/gpu/ipc_push.py."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from protos.weights import backends
from protos.weights.ipc import IpcGroup

MEMORY: dict[bytes, torch.Tensor] = {}
STORES: list[dist.TCPStore] = []


class OnHost(IpcGroup):
    """Shares host memory by a number."""

    def _synchronize(self) -> None:
        pass

    def _describe(self, tensor: torch.Tensor) -> bytes:
        key = str(tensor.untyped_storage().data_ptr()).encode()
        MEMORY[key] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return key

    def _open(self, message: bytes) -> torch.Tensor:
        return MEMORY[message]


def groups(size: int) -> list[OnHost]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    clients = [dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False) for _ in range(size)]
    STORES.append(store)  # the server lives as long as it is referred to
    return [OnHost(dist.PrefixStore("key", client), rank, size, torch.device("cpu")) for rank, client in enumerate(clients)]


def together(made: list[OnHost], tensors: list[torch.Tensor], timeout_s: float = 5.0) -> list[Exception | None]:
    def one(group: OnHost, tensor: torch.Tensor) -> Exception | None:
        try:
            group.broadcast(tensor, timeout_s, threading.Event())
        except RuntimeError as error:
            return error
        return None

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(one, made, tensors))


def test_a_buffer_that_is_used_again_never_loses_what_was_in_it_before_everybody_took_it() -> None:
    made, buffer = groups(3), torch.zeros(16, dtype=torch.uint8)
    for turn in range(5):
        buffer.fill_(turn)
        targets = [torch.full((8,), 99, dtype=torch.uint8) for _ in range(2)]
        assert together(made, [buffer[8:], *targets]) == [None] * 3  # a part of the buffer, which lies at an offset
        assert [target.tolist() for target in targets] == [[turn] * 8] * 2


def test_a_look_into_the_store_comes_ever_later_and_each_bucket_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each look takes the interpreter from the engine's steps in the same process: half a millisecond at first, four at the most.
    (group,) = groups(1)
    slept: list[float] = []
    mine, really = threading.get_ident(), time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds) if threading.get_ident() == mine else really(seconds))  # threads of other tests sleep on
    for _ in range(2):
        group.broadcast(torch.zeros(8, dtype=torch.uint8), 5.0, threading.Event())  # nobody else: nothing to wait for
        for _ in range(30):
            group._wait([0], time.monotonic() + 60, threading.Event())
    assert slept[:2] == [0.0005, 0.000625] and slept[29] == 0.004 and slept[30:] == slept[:30]


def test_memory_that_was_described_is_held_so_that_its_description_stays_true(monkeypatch: pytest.MonkeyPatch) -> None:
    # Freed, another buffer could come to lie at its address, and receivers would be sent to the old one.
    made = IpcGroup.__new__(IpcGroup)
    made._shared, made._opened, made._device = {}, {}, torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))

    class Storage:
        def __init__(self) -> None:
            self.num_shared = 0

        def data_ptr(self) -> int:
            return id(self)

        def nbytes(self) -> int:
            return 8

        def _share_cuda_(self) -> tuple[object, ...]:
            self.num_shared += 1
            return (0, b"handle", 8, 0, b"counter", 0, b"event", False)

    storage = Storage()
    tensor = SimpleNamespace(untyped_storage=lambda: storage)
    assert made._describe(tensor) == made._describe(tensor) and storage.num_shared == 1  # type: ignore[arg-type]
    assert [held for held, _ in made._shared.values()] == [storage]
    made.close()
    assert not made._shared


def test_a_receiver_that_is_not_there_is_named_by_the_deadline() -> None:
    made, began = groups(3), time.monotonic()
    errors = together(made[:2], [torch.zeros(8, dtype=torch.uint8)] * 2, timeout_s=0.5)
    assert str(errors[0]) == "no answer by ranks [2]" and errors[1] is None
    assert time.monotonic() - began < 20


def test_a_root_that_cannot_share_tells_the_receivers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> bytes:
        raise RuntimeError("CUDA error: not supported")

    made, began = groups(2), time.monotonic()
    monkeypatch.setattr(made[0], "_describe", refuses)
    errors = together(made, [torch.zeros(8, dtype=torch.uint8)] * 2, timeout_s=30)
    assert "CUDA error: not supported" in str(errors[0]) and "the root cannot share its memory by CUDA IPC: RuntimeError: CUDA error: not supported; set push.transport" in str(errors[1])
    assert time.monotonic() - began < 10


def test_a_receiver_that_cannot_open_the_memory_tells_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> torch.Tensor:
        raise RuntimeError("GPU-7 is not seen")

    made = groups(2)
    monkeypatch.setattr(made[1], "_open", refuses)
    errors = together(made, [torch.zeros(8, dtype=torch.uint8)] * 2)
    assert str(errors[0]) == "receiver 1 cannot take it: GPU-7 is not seen" and "GPU-7 is not seen" in str(errors[1])


def test_buckets_of_two_sizes_are_an_error_on_both_sides() -> None:
    errors = together(groups(2), [torch.zeros(8, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)])
    assert "the root sends 8 bytes where 16 were announced" in str(errors[1]) and errors[0] is not None


def test_a_cpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(RuntimeError, match="transport ipc passes memory of GPUs, and this process works on a cpu; set push.transport to gloo or auto"):
        backends.IpcWire("h", 1, torch.device("cpu"))
