"""Where a rank finds the others."""

from __future__ import annotations

import pytest

from learner.trainer.world import Place, init_method, resolve_device


@pytest.mark.parametrize(
    ("given", "spelling"),
    [("", "env://"), ("file:///tmp/r", "file:///tmp/r"), ("/tmp/r", "file:///tmp/r"), ("10.0.0.1:29500", "tcp://10.0.0.1:29500"), ("tcp://h:1", "tcp://h:1")],
)
def test_a_rendezvous_may_be_a_file_or_an_address(given: str, spelling: str) -> None:
    assert init_method(given) == spelling


def test_torchruns_environment_places_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert Place.from_environment() == Place(rank=1, size=4, rendezvous="", incarnation=None)


def test_a_rank_that_nobody_placed_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        Place.from_environment()


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert resolve_device("auto", 0).type == "cpu"
    with pytest.raises(ValueError, match="device: cpu or auto"):
        resolve_device("cuda", 0)


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_device("auto", 1, 2).index == 1
    with pytest.raises(ValueError, match=r"trainer.ranks=3 on 2 CUDA devices: NCCL refuses two ranks on one device; use trainer.ranks of at most 2"):
        resolve_device("auto", 0, 3)
    monkeypatch.setenv("LOCAL_RANK", "1")  # torchrun on the second of two machines
    assert resolve_device("auto", 3, 4).index == 1
