"""A slow, lossy network between this namespace and another one: real TCP over two tun devices, packets carried by a thread.

Linux' own netem does the same where the kernel has it; this needs root and /dev/net/tun alone.

    with lossy_link(delay_s=0.1, loss=0.01, seed=1) as link:      # link.host is this side's address
        subprocess.run([*link.enter, "python", ...])              # a process that reaches nothing but link.host
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_SET_IFF, _TUN_NO_INFO = 0x400454CA, 0x0001 | 0x1000  # TUNSETIFF; IFF_TUN | IFF_NO_PI
_NUMBERS = itertools.count(os.getpid() % 60 * 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    host: str  # this side's address
    enter: tuple[str, ...]  # prefix of a command that runs on the other side
    carried: list[int]  # [packets carried, packets lost]


def _tun(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, _SET_IFF, struct.pack("16sH", name.encode(), _TUN_NO_INFO))
    return handle


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def possible() -> bool:
    """Whether this process may make such a link."""
    return os.geteuid() == 0 and os.access("/dev/net/tun", os.R_OK | os.W_OK)


def _carry(handles: tuple[int, int], delay_s: float, loss: float, seed: int, over: threading.Event, carried: list[int]) -> None:
    draw, number = random.Random(seed), 0
    waiting: list[tuple[float, int, int, bytes]] = []
    while not over.is_set():
        until_s = max(0.0, min(0.05, waiting[0][0] - time.monotonic())) if waiting else 0.05
        for handle in select.select(handles, [], [], until_s)[0]:
            packet = os.read(handle, 65536)
            if draw.random() < loss:
                carried[1] += 1
                continue
            number += 1
            heapq.heappush(waiting, (time.monotonic() + delay_s, number, handles[handle == handles[0]], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            carried[0] += 1
            try:
                os.write(target, packet)
            except OSError:
                carried[1] += 1  # the queue of the device is full, as a router's may be


@contextmanager
def lossy_link(*, delay_s: float, loss: float, seed: int) -> Iterator[Link]:
    """delay_s: of each packet, one way. loss: share of packets, either way."""
    number = next(_NUMBERS)
    near, far, space, net = f"hrn{number}", f"hrf{number}", f"headrace{number}", f"10.211.{number % 250}"
    over, carried = threading.Event(), [0, 0]
    _ip("netns", "add", space)
    handles = (_tun(near), _tun(far))
    carrier = threading.Thread(target=_carry, args=(handles, delay_s, loss, seed, over, carried), daemon=True)
    try:
        _ip("addr", "add", f"{net}.1/24", "dev", near)
        _ip("link", "set", near, "up")
        _ip("link", "set", far, "netns", space)
        for words in (("addr", "add", f"{net}.2/24", "dev", far), ("link", "set", far, "up"), ("link", "set", "lo", "up")):
            _ip("-n", space, *words)
        carrier.start()
        yield Link(host=f"{net}.1", enter=("ip", "netns", "exec", space), carried=carried)
    finally:
        over.set()
        carrier.join(5)
        for handle in handles:
            os.close(handle)
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
