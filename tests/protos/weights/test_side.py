"""A side's stream and windows are made once, and what was launched inside is done afterwards; with a stand-in for CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from protos.weights.side import Side


def test_a_side_keeps_its_stream_from_update_to_update_and_waits_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another stream would be other memory of the allocator's: new calls of the driver in each update, under a running engine.
    seen: list[str] = []

    class Stream:
        made = 0

        def __init__(self, device: torch.device) -> None:
            Stream.made += 1
            self.name = f"{device} {Stream.made}"

        def synchronize(self) -> None:
            seen.append(f"wait {self.name}")

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        seen.append(f"enter {stream.name}")
        yield
        seen.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    side = Side(torch.device("cuda", 3))
    for _ in range(2):
        with side.open():
            seen.append("work")
    assert seen == 2 * ["enter cuda:3 1", "work", "leave", "wait cuda:3 1"]


def test_a_cpu_s_side_has_windows_and_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", None)  # it is not called
    side, tensor = Side(torch.device("cpu")), torch.arange(6.0)
    with side.open():
        assert side.moved(tensor) is tensor
    assert side.windows is side.windows
