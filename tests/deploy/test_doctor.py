"""`headrace doctor` finds each planted fault in one line, and nothing where nothing is wrong."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from typer.testing import CliRunner

from deploy.cli import app
from deploy.doctor import machine, run_file, run_folder
from deploy.doctor.machine import Machine
from deploy.mistakes import Mistakes
from deploy.schema import load
from deploy.status import fetch
from protos.learner.v1alpha1 import learner_pb2, learner_pb2_grpc
from protos.rollout.v1alpha1 import rollout_pb2
from protos.rpc import Security, Server

GOOD = Machine(
    python=(3, 11), versions={"torch": "2.13.0+cu130", "vllm": "0.32.0", "transformers": "5.16.1", "torchvision": "0.28.0"}, torch_wanted={"torchvision": "2.13.0"},
    driver="580.95.05", cuda="13.0", has_nccl=True, shm_free_bytes=8 << 30, disk_free_bytes=100 << 30, disk_bytes_per_s=500e6, disk_ahead_s=0.0, disk_failed="", open_files=65536, num_ports=16,
    clock_s=1_800_000_000.0, newest_file_s=1_790_000_000.0,
)  # fmt: skip


def test_a_good_machine_has_no_findings() -> None:
    assert list(machine.findings(GOOD)) == []
    assert list(machine.findings(replace(GOOD, versions={}, torch_wanted={}, driver="", cuda="", has_nccl=False))) == []  # a reward server's: nothing is installed but what it needs


@pytest.mark.parametrize(
    ("planted", "line"),
    [
        ({"python": (3, 10)}, "Python is 3.10, 3.11 or later is needed"),
        ({"versions": {"torch": "2.9.1"}, "torch_wanted": {}, "cuda": ""}, "torch 2.9.1 is installed, 2.11 to 2.14 are tested"),
        ({"versions": {"vllm": "0.34.0"}, "torch_wanted": {}}, "vllm 0.34.0 is installed, 0.26 to 0.33 are tested"),
        ({"versions": {"transformers": "4.57.0"}, "torch_wanted": {}}, "transformers 4.57.0 is installed, 5.16"),
        ({"torch_wanted": {"torchvision": "2.12.0"}}, "torchvision 0.28.0 was built for torch 2.12.0, 2.13.0+cu130 is installed"),
        ({"torch_wanted": {"vllm": "2.12.0"}}, "vllm 0.32.0 was built for torch 2.12.0, 2.13.0+cu130 is installed: its kernels may not load; pip install 'torch==2.12.0'"),
        ({"versions": {"torch": "2.13.0+cpu"}, "torch_wanted": {}, "cuda": ""}, "torch 2.13.0+cpu is built for CPUs"),
        ({"driver": "570.86.15"}, "driver 570.86.15 is older than CUDA 13.0 of torch 2.13.0+cu130 needs (580.65)"),
        ({"has_nccl": False}, "no nvidia-nccl is installed"),
        ({"shm_free_bytes": 64 << 20}, "/dev/shm has 64 MiB free"),
        ({"disk_free_bytes": 1 << 30}, "the disk has 1024 MiB free"),
        ({"disk_bytes_per_s": 9e6}, "the disk writes and syncs 9 MB/s, under 50"),
        ({"disk_ahead_s": 90.0}, "the disk stamps files 90 s ahead of this machine's clock"),
        ({"disk_ahead_s": -90.0}, "the disk stamps files 90 s behind this machine's clock"),
        ({"disk_failed": "No space left on device", "disk_bytes_per_s": 0.0}, "the disk cannot be written (No space left on device)"),
        ({"open_files": 256}, "this process may open 256 files"),
        ({"num_ports": 3}, "3 of 16 loopback ports could be had"),
        ({"clock_s": 1_700_000_000.0}, "the clock says 2023-11-14 22:13:20 UTC"),
    ],
)
def test_a_fault_of_the_machine_is_one_line(planted: dict[str, Any], line: str) -> None:
    (found,) = machine.findings(replace(GOOD, **planted))
    assert line in found


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    seen = machine.look(tmp_path)
    assert seen.python >= (3, 11) and seen.num_ports == 16 and seen.disk_bytes_per_s > 0 and abs(seen.disk_ahead_s) < machine.MAX_CLOCK_S and "transformers" in seen.versions
    assert list(tmp_path.iterdir()) == []


# --- a run file

A_DISK = machine.Disk(bytes_per_s=500e6, ahead_s=0.0)


@pytest.fixture(autouse=True)
def a_good_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else writes to this machine's now."""
    monkeypatch.setattr(run_file, "probe", lambda folder: A_DISK)


def weights(size: int = 4) -> bytes:
    """A whole file of one tensor of so many bytes: length of the header, header, data."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def a_file(folder: Path, **changes: Any) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 10}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(weights())
    (folder / "prompts.jsonl").write_text('{"prompt": "1"}\n')
    content: dict[str, Any] = {"run_dir": str(folder / "run"), "model": str(model), "learner": {"data": {"prompts": str(folder / "prompts.jsonl")}, "trainer": {"served_dtype": "float32"}}, "rollout": {}, "reward": {"scorers": [{"name": "a", "use": "exact"}]}}
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) and isinstance(content[key], dict) else value
    file = folder / "run.yaml"
    file.write_text(json.dumps(content))
    return file


def test_a_good_file_has_no_findings(tmp_path: Path) -> None:
    assert list(run_file.findings(a_file(tmp_path))) == []


def test_mistakes_of_a_file_are_findings(tmp_path: Path) -> None:
    (found,) = run_file.findings(a_file(tmp_path, rollout={"dtype": "bfloat16"}))
    assert "learner.trainer.served_dtype=float32 differs from rollout.dtype=bfloat16" in found


@pytest.mark.parametrize(("section", "key"), [("learner", "address"), ("learner", "metrics_address"), ("rollout", "metrics_address"), ("rollout", "openai.address"), ("reward", "metrics_address")])
def test_an_address_in_use_is_found(tmp_path: Path, section: str, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        outer, _, inner = key.partition(".")
        (found,) = run_file.findings(a_file(tmp_path, **{section: {outer: {inner: address} if inner else address}}))
    assert found.startswith(f"{section}.{key}={address}: cannot be listened on (Address already in use)")


@pytest.mark.parametrize(
    ("disk", "words"),
    [
        (machine.Disk(bytes_per_s=9e6, ahead_s=0.0), "its disk writes and syncs 9 MB/s, under 50"),
        (machine.Disk(bytes_per_s=500e6, ahead_s=-61.0), "its disk stamps files 61 s behind this machine's clock"),
    ],
)
def test_a_slow_disk_and_a_clock_that_is_apart_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: machine.Disk, words: str) -> None:
    monkeypatch.setattr(run_file, "probe", lambda folder: disk)
    (found,) = run_file.findings(a_file(tmp_path))
    assert found.startswith(f"run_dir={tmp_path / 'run'}: {words}")


def test_a_reward_server_that_is_not_there_is_found(tmp_path: Path) -> None:
    (found,) = run_file.findings(a_file(tmp_path, reward=None, rollout={"rewards": ["127.0.0.1:9"]}))
    assert found.startswith("rollout.rewards: 127.0.0.1:9 does not answer (Connection refused)")


def test_a_model_without_weights_is_found(tmp_path: Path) -> None:
    file = a_file(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    (found,) = run_file.findings(file)
    assert "the folder has no *.safetensors, hence no weights" in found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "model.safetensors is a pointer of Git LFS"),
        (weights(100)[:-60], f"model.safetensors is cut off: {len(weights(100)) - 60} bytes of {len(weights(100))}"),
        (weights()[:20], "model.safetensors is cut off: 20 bytes, its header alone has"),
        (b"\x02\0\0\0\0\0\0\0[]", "model.safetensors has a header that cannot be read"),
    ],
)
def test_weights_that_are_not_whole_are_found(tmp_path: Path, content: bytes, words: str) -> None:
    file = a_file(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    (found,) = run_file.findings(file)
    assert words in found and "fetch it again" in found


def test_shards_that_the_index_names_and_the_folder_has_not_are_found(tmp_path: Path) -> None:
    file = a_file(tmp_path)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("abc", shards, strict=True))}))
    (tmp_path / "model" / shards[0]).write_bytes(weights())
    (found,) = run_file.findings(file)
    assert f"model.safetensors.index.json names {shards[1]} and 1 more files, which the folder has not" in found


def a_cluster(folder: Path, **communication: Any) -> Path:
    file = a_file(folder)
    content = json.loads(file.read_text())
    place = {"node_group": "here"}
    file.write_text(json.dumps({**content, "cluster": {"node_groups": [{"name": "here", "gpus_per_node": 0}], "communication": communication}, "roles": {"actor": place, "rollout": place}}))
    return file


def cards(folder: Path, state: str) -> Path:
    """As /sys/class lists network cards: lo, eth0, and one RDMA port in a state; empty: none."""
    for name in ("lo", "eth0"):
        (folder / "net" / name).mkdir(parents=True)
    if state:
        (folder / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
        (folder / "infiniband" / "mlx5_0" / "ports" / "1" / "state").write_text(state)
    return folder


@pytest.mark.parametrize(
    ("state", "words"),
    [("", "lists no device"), ("1: DOWN\n", "ports are 1: DOWN"), ("4: ACTIVE\n", "")],
)
def test_rdma_that_is_not_there_is_found(tmp_path: Path, state: str, words: str) -> None:
    run = load(a_cluster(tmp_path, rdma_enabled=True, interface="eth0"))
    found = list(run_file.network_findings(run, cards(tmp_path / "class", state)))
    assert len(found) == bool(words) and all("rdma_enabled=true" in line and words in line for line in found)


def test_an_interface_that_is_not_there_is_found(tmp_path: Path) -> None:
    (found,) = run_file.network_findings(load(a_cluster(tmp_path, interface="ib7")), cards(tmp_path / "class", ""))
    assert found.startswith("cluster.communication.interface=ib7: this machine has eth0, lo")


def test_a_disk_that_is_nearly_full_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=100 << 20))
    (found,) = run_file.findings(a_file(tmp_path))
    assert found == f"run_dir={tmp_path / 'run'}: 100 MiB are free on its disk, journal and checkpoints need 10240 MiB or more: make room, or put run_dir elsewhere"


# --- a run folder


def entry(record: dict[str, Any], durable: int) -> bytes:
    """As the journal's description in deploy/audit/segments.py."""
    body = msgpack.packb(record)
    lengths = struct.pack("<III", len(body), 0, durable)
    return b"\xab\x48\x52\x45" + lengths + struct.pack("<I", zlib.crc32(body, zlib.crc32(lengths))) + body


FIRST = b"HEADRACE" + struct.pack("<I", 1) + entry({"type": "prompts"}, 12)


def a_run(folder: Path, *, made: int = 10, steps: int = 10) -> Path:
    """A finished run at rest."""
    for name in ("resolved", "journal", "checkpoints/step-000010"):
        (folder / name).mkdir(parents=True)
    (folder / "resolved" / "learner.json").write_text(json.dumps({"steps": steps, "checkpoint": {"every_steps": 5}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step + 1}) + "\n" for step in range(made)))
    (folder / "journal" / "000000000000.log").write_bytes(FIRST)
    (folder / "journal" / "LOCK").write_text("")
    (folder / "learner.lock").touch()
    (folder / "checkpoints" / "step-000010" / "cut.json").write_text("{}")
    return folder


@contextmanager
def holding(lock: Path) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_good_run_has_no_findings(tmp_path: Path) -> None:
    assert list(run_folder.findings(a_run(tmp_path))) == []


def test_a_stale_address_and_its_dead_holder_are_found(tmp_path: Path) -> None:
    run = a_run(tmp_path, made=8)
    (run / "gateway.address").write_text("127.0.0.1:9\n")
    (run / "journal" / "LOCK").write_text("4194300")
    dead, stale = run_folder.findings(run)
    assert "LOCK names process 4194300, which holds it no more, and 8 of 10 steps are made" in dead
    assert "gateway.address is stale: nothing listens on 127.0.0.1:9 (Connection refused) and no learner runs" in stale


def test_a_gateway_left_behind_is_found(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run / "journal" / "LOCK").write_text(str(os.getpid()))
    with holding(run / "journal" / "LOCK"):
        (found,) = run_folder.findings(run)
    assert f"LOCK is held by process {os.getpid()}, and no learner holds" in found


def test_a_gateway_that_does_not_answer_is_found(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run / "gateway.address").write_text("127.0.0.1:9\n")
    with holding(run / "learner.lock"):
        (found,) = run_folder.findings(run)
    assert found.startswith("the gateway does not answer: no learner answers on 127.0.0.1:9 (UNAVAILABLE)")


def test_a_torn_journal_is_found(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run / "journal" / "000000000000.log").write_bytes(FIRST + entry({"type": "opened"}, len(FIRST))[:-3])
    (found,) = run_folder.findings(run)
    assert f"journal/000000000000.log at {len(FIRST)}: a torn tail of" in found and "the next start cuts it off" in found
    with holding(run / "journal" / "LOCK"), holding(run / "learner.lock"):
        assert not [line for line in run_folder.findings(run) if "torn tail" in line]  # somebody may be writing it


def test_a_damaged_journal_is_found(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    broken = bytearray(FIRST)
    broken[-1] ^= 1
    (run / "journal" / "000000000000.log").write_bytes(bytes(broken) + entry({"type": "opened"}, len(FIRST)))
    (found,) = run_folder.findings(run)
    assert "the checksum does not match, though it had been whole once" in found


def test_missing_cuts_are_found(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run / "checkpoints" / "step-000010" / "cut.json").unlink()
    (found,) = run_folder.findings(run)
    assert "10 steps are made, a cut is due every 5" in found and "(1 unfinished)" in found


def test_a_stale_replica_is_found() -> None:
    replica = learner_pb2.GetStatusResponse.Replica
    status = learner_pb2.GetStatusResponse(newest_version=7, replicas=[
        replica(replica_id="rollout-0", address="h:1", state=rollout_pb2.REPLICA_STATE_SERVING, loaded_version=7, attending=True),
        replica(replica_id="rollout-1", address="h:2", state=rollout_pb2.REPLICA_STATE_STALE, loaded_version=5, attending=True, detail="apply failed"),
        replica(replica_id="rollout-2", address="h:3", state=rollout_pb2.REPLICA_STATE_STALE, attending=False, silent_s=42.0),
    ])  # fmt: skip
    stale, gone = run_folder.of_status(status)
    assert stale.startswith("replica rollout-1 at h:2 is STALE at version 5, 7 is published (apply failed)")
    assert gone.startswith("replica rollout-2 at h:3 is gone, last heard 42 s ago")
    status.finished = True
    assert len(list(run_folder.of_status(status))) == 1  # after a run all of them are gone


async def test_a_wrong_token_is_told_from_a_learner_that_is_not_there() -> None:
    server = Server("127.0.0.1:0", [lambda s: learner_pb2_grpc.add_LearnerServiceServicer_to_server(learner_pb2_grpc.LearnerServiceServicer(), s)], Security(token="right"))
    await server.start()
    await server.ready()
    try:
        with pytest.raises(Mistakes, match=rf"the learner on 127.0.0.1:{server.port} asks for a bearer token, and takes another one than was given"):
            await fetch(f"127.0.0.1:{server.port}", Security(token="wrong"))
    finally:
        await server.stop(grace_s=1.0)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistakes, match="it is no run folder"):
        list(run_folder.findings(tmp_path))


def test_the_command_exits_with_1_for_findings_0_without_and_2_for_neither(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    assert CliRunner().invoke(app, ["doctor", str(run)]).exit_code == 0
    (run / "checkpoints" / "step-000010" / "cut.json").unlink()
    told = CliRunner().invoke(app, ["doctor", str(run)])
    assert told.exit_code == 1 and "a cut is due every 5" in told.output
    assert CliRunner().invoke(app, ["doctor", str(tmp_path / "nowhere")]).exit_code == 2
