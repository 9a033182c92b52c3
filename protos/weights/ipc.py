"""Learner and replica on the same GPUs: buckets pass by CUDA IPC, announced and acknowledged in the rendezvous store.

    root                                               receiver
    fill buffer, synchronize
    store: bucket n = which memory  ─────────────────▶ open that memory once, copy bucket n out of it, synchronize
    wait for every acknowledgement  ◀───────────────── store: bucket n taken by r

NCCL refuses two ranks on one device; here nothing leaves it. What travels is a handle of the CUDA driver in a message of our own
(msgpack of plain values), never a pickle. Receivers open memory of every root's device, so they must see those devices.
"""

from __future__ import annotations

import threading
import time

import msgpack
import torch
import torch.distributed as dist

from protos.weights import marks

_ASK_S, _LONGEST_ASK_S = 0.0005, 0.004  # between two looks into the store: each look takes the interpreter from an engine's step

# What torch's Storage._share_cuda_ gives and Storage._new_shared_cuda takes, by name on the wire; the device is sent as its UUID.
_FIELDS = ("handle", "size_bytes", "offset_bytes", "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required")


class IpcGroup:
    """One root's buckets for several receivers. Rank 0 is the root. Used by one thread."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._device = device
        self._number = 0
        self._ask_s = _ASK_S
        self._shared: dict[int, tuple[torch.UntypedStorage, bytes]] = {}  # root: by address a storage, held so that no other comes to lie there, and the message that describes it
        self._opened: dict[bytes, torch.Tensor] = {}  # receiver: message to the memory it describes

    def broadcast(self, tensor: torch.Tensor, timeout_s: float, abandoned: threading.Event) -> None:
        """The root's bytes in everybody's tensor. Raises RuntimeError naming who did not answer within timeout_s."""
        self._number += 1
        self._ask_s = _ASK_S
        end = time.monotonic() + timeout_s
        if self._rank == 0:
            self._send(tensor, end, abandoned)
        else:
            self._receive(tensor, end, abandoned)

    def close(self) -> None:
        """Lets go of other processes' memory."""
        self._opened.clear()
        self._shared.clear()

    def _send(self, tensor: torch.Tensor, end: float, abandoned: threading.Event) -> None:
        self._synchronize()  # who fills the buffer has waited for it on its own stream
        try:
            announcement = [self._describe(tensor), tensor.storage_offset(), tensor.numel(), ""]
        except Exception as error:  # whatever the driver says: the receivers wait for this bucket and must hear it
            self._store.set(f"bucket/{self._number}", msgpack.packb([b"", 0, 0, f"{type(error).__name__}: {error}".splitlines()[0]]))
            raise
        self._store.set(f"bucket/{self._number}", msgpack.packb(announcement))
        taken = {f"bucket/{self._number}/taken/{rank}": rank for rank in range(1, self._size)}
        while taken:
            self._wait(list(taken.values()), end, abandoned)
            for key in [key for key in taken if self._store.check([key])]:
                answer = self._store.get(key).decode()
                if answer:
                    raise RuntimeError(f"receiver {taken[key]} cannot take it: {answer}")
                self._store.delete_key(key)
                del taken[key]
        self._store.delete_key(f"bucket/{self._number}")

    def _receive(self, tensor: torch.Tensor, end: float, abandoned: threading.Event) -> None:
        while not self._store.check([f"bucket/{self._number}"]):
            self._wait([0], end, abandoned)
        message, offset, size, failure = msgpack.unpackb(self._store.get(f"bucket/{self._number}"))
        if failure:
            raise RuntimeError(f"the root cannot share its memory by CUDA IPC: {failure}; set push.transport to gloo or nccl")
        answer = ""
        try:
            if size != tensor.numel():
                raise RuntimeError(f"the root sends {size} bytes where {tensor.numel()} were announced")
            with marks.span("open memory"):
                source = self._open(message)[offset : offset + size]
            with marks.span("copy bucket"):
                tensor.copy_(source)
                self._synchronize()
        except RuntimeError as error:
            answer = str(error).splitlines()[0]
            raise
        finally:
            self._store.set(f"bucket/{self._number}/taken/{self._rank}", answer)

    def _wait(self, ranks: list[int], end: float, abandoned: threading.Event) -> None:
        if abandoned.is_set():
            raise RuntimeError("abandoned")
        if time.monotonic() > end:
            raise RuntimeError(f"no answer by ranks {ranks}")
        time.sleep(self._ask_s)
        self._ask_s = min(1.25 * self._ask_s, _LONGEST_ASK_S)

    def _synchronize(self) -> None:
        """Of this thread's own stream alone: the device also has a training step or an engine's to do."""
        torch.cuda.current_stream(self._device).synchronize()

    def _describe(self, tensor: torch.Tensor) -> bytes:
        """A storage is shared once: torch counts its users, and a second description would be another user."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._shared:
            device, *values = storage._share_cuda_()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._shared[storage.data_ptr()] = storage, msgpack.packb([uuid, storage.nbytes(), dict(zip(_FIELDS, values, strict=True))])
        return self._shared[storage.data_ptr()][1]

    def _open(self, message: bytes) -> torch.Tensor:
        if message not in self._opened:
            uuid, num_bytes, values = msgpack.unpackb(message)
            device = _device_of(uuid)
            try:
                with torch.cuda.device(device):
                    storage = torch.UntypedStorage._new_shared_cuda(device, *(values[field] for field in _FIELDS))
            except RuntimeError as error:
                raise RuntimeError(
                    f"CUDA IPC memory of GPU {uuid} cannot be opened ({str(error).splitlines()[0]}): learner and replica must run on one machine, in containers "
                    "that share IPC and process namespaces; else set push.transport to gloo or nccl"
                ) from None
            self._opened[message] = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage, 0, (num_bytes,), (1,))
        return self._opened[message]


def visible_devices() -> dict[str, int]:
    """UUID to index of every CUDA device that this process sees."""
    return {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}


def _device_of(uuid: str) -> int:
    seen = visible_devices()
    if uuid not in seen:
        raise RuntimeError(f"the trainer's memory lies on GPU {uuid}, which this process does not see (it sees {', '.join(seen) or 'none'}): let it see that GPU, or set push.transport to gloo or nccl")
    return seen[uuid]

