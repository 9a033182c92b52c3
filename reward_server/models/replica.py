"""One process of one replica: `python -m reward_server.models.replica FD`. Loads its model, then answers batches until the front is gone.

Front to replica: `[spec, device]`, then batches `[[prompt, completion], ...]`. Replica to front: `[true, ""]` or `[false, what is wrong]`,
then for each batch as many answers: a number, or the words for why there is none. msgpack over a socket pair.
With tensor parallelism every rank gets every batch, and the first one answers.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import msgpack

from reward_server.models.spec import ModelSpec
from reward_server.sandbox.jail import die_with_parent

_READ_BYTES = 1 << 18


def main() -> None:
    """Ends with the front."""
    die_with_parent()
    line = socket.socket(fileno=int(sys.argv[1]))
    received = _messages(line)
    packed, device = next(received)
    try:
        from reward_server.models import asking

        spec = ModelSpec.unpacked(packed)
        _prepare(spec, device)
        model = asking.load(spec, device)
    except Exception as error:  # the supervised edge: whatever it is, the front refuses to start with it
        line.sendall(msgpack.packb([False, f"{'' if isinstance(error, ValueError) else type(error).__name__ + ': '}{str(error)[:1000]}"]))
        return
    line.sendall(msgpack.packb([True, ""]))
    is_first = os.environ.get("RANK", "0") == "0"
    for batch in received:  # until the front is gone
        answers = model.answers([(prompt, completion) for prompt, completion in batch])
        if is_first:
            line.sendall(msgpack.packb(answers))


def _prepare(spec: ModelSpec, device: str) -> None:
    import torch

    if device != "cpu" and not torch.accelerator.is_available():
        raise ValueError(f"device {device!r}: torch {torch.__version__} sees no accelerator here; use devices: [cpu], or install torch for this machine")
    if device.startswith("cuda") and int(device.partition(":")[2]) >= torch.cuda.device_count():
        raise ValueError(f"device {device!r}: torch sees {torch.cuda.device_count()} of them; the first is cuda:0")
    if device == "cpu" and spec.threads:
        torch.set_num_threads(spec.threads)
    if spec.tensor_parallel > 1:
        torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")


def _messages(line: socket.socket) -> Any:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    while data := line.recv(_READ_BYTES):
        unpacker.feed(data)
        yield from unpacker


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of libraries do not keep the process
