"""A receiver with two sending threads over real gloo, and the landing around it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import backends, staging
from protos.weights.errors import TransferError
from protos.weights.group import TransferGroup
from protos.weights.landing import Landing
from protos.weights.membership import address, join
from protos.weights.receiver import Receiver
from protos.weights.side import Side
from protos.weights.staging import VerifiedStaging, digest

# One tensor of 4 rows of 8 bytes; owner 0 holds rows 0 and 1, owner 1 rows 2 and 3; buckets of one row, owners in turn.
CONTENT = np.arange(32, dtype=np.uint8)
ORDER = [(0, 0), (1, 2), (0, 1), (1, 3)]  # (owner, row) in sending order


def manifest(version: int = 7) -> manifest_pb2.Manifest:
    made = manifest_pb2.Manifest(version=version)
    made.tensors.add(name="w", shape=[4, 2], dtype="float32")
    for index, (owner, row) in enumerate(ORDER):
        made.buckets.add(owner=owner, root=owner, num_bytes=8, file_offset=8 * (row % 2))
        made.slices.add(tensor=0, tensor_offset=8 * row, num_bytes=8, owner=owner, bucket=index, digest=digest(CONTENT[8 * row : 8 * row + 8]))
    return made


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def spec(store: dist.TCPStore, key: str = "k1", timeout_s: float = 10.0) -> learner_pb2.GroupSpec:
    return learner_pb2.GroupSpec(
        transport=learner_pb2.TRANSPORT_GLOO,
        store_host="127.0.0.1",
        store_port=store.port,
        group_key=key,
        num_owners=2,
        num_receivers=1,
        receiver_rank=1,
        collective_timeout_s=timeout_s,
    )


def send(where: learner_pb2.GroupSpec, owner: int, group: TransferGroup | None = None, flip: bool = False) -> TransferGroup:
    """An owner's whole part, in a thread of its own."""
    if group is None:
        group = join(where, [0, 1], root=owner, timeout_s=10)
    for sender, row in ORDER:
        if sender == owner:
            data = torch.from_numpy(CONTENT[8 * row : 8 * row + 8].copy())
            if flip:
                data[3] ^= 4
            group.broadcast(data, part=owner, what=f"row {row}", timeout_s=10)
    return group


def received(landing: Landing, version: int = 7) -> list[int]:
    (name, tensor), *rest = landing.take(version).tensors()
    assert name == "w" and not rest and tensor.shape == (4, 2)
    return tensor.reshape(-1).view(torch.uint8).tolist()


def ended(landing: Landing) -> str:
    limit = time.monotonic() + 15
    while landing.state().phase == "receiving" and time.monotonic() < limit:
        time.sleep(0.01)
    return landing.state().phase


def test_two_owners_buckets_land_and_the_groups_serve_the_next_version_too(store: dist.TCPStore) -> None:
    landing, where = Landing(), spec(store)
    with ThreadPoolExecutor(2) as pool:
        sending: list[Future[TransferGroup]] = [pool.submit(send, where, owner) for owner in range(2)]
        landing.begin_receive(where.SerializeToString(), manifest(7).SerializeToString(), 20.0)
        assert ended(landing) == "ready" and received(landing, 7) == CONTENT.tolist()
        groups = [future.result() for future in sending]
        again = [pool.submit(send, where, owner, groups[owner]) for owner in range(2)]
        landing.begin_receive(where.SerializeToString(), manifest(8).SerializeToString(), 20.0)
        assert ended(landing) == "ready" and received(landing, 8) == CONTENT.tolist()
        assert [future.result() for future in again] == groups
    landing.close()


def test_another_group_key_makes_new_groups(store: dist.TCPStore) -> None:
    receiver = Receiver()
    for key in ("k1", "k2"):
        with ThreadPoolExecutor(2) as pool:
            sending = [pool.submit(send, spec(store, key), owner) for owner in range(2)]
            receiver.receive(spec(store, key), manifest(), timeout_s=20.0)
            for future in sending:
                future.result().close()
    receiver.close()


def test_a_flipped_bit_on_the_way_fails_with_the_tensors_name(store: dist.TCPStore) -> None:
    landing, where = Landing(), spec(store)
    with ThreadPoolExecutor(2) as pool:
        sending = [pool.submit(send, where, owner, None, owner == 1) for owner in range(2)]
        landing.begin_receive(where.SerializeToString(), manifest().SerializeToString(), 20.0)
        assert ended(landing) == "failed"
        for future in sending:
            future.result()
    assert "2 of 4 slices" in landing.state().detail and landing.state().detail.endswith("tensors: w; the old weights stay")
    with pytest.raises(TransferError, match="version 7 is not ready to commit: failed"):
        landing.take(7)


def test_a_bucket_that_is_slow_to_digest_is_not_overwritten_by_the_next(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(data: np.ndarray) -> int:
        time.sleep(0.2)  # the senders do not wait for it
        return digest(data)

    monkeypatch.setattr(staging, "digest", slow)
    with ThreadPoolExecutor(2) as pool:
        sending = [pool.submit(send, spec(store), owner) for owner in range(2)]
        Receiver().receive(spec(store), manifest(), timeout_s=20.0)
        for future in sending:
            future.result().close()


def test_a_broadcast_that_does_nothing_is_no_success(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:  # faults.md 14
    where = spec(store)
    with ThreadPoolExecutor(2) as pool:
        groups = [pool.submit(join, where, [0, 1], root=o, timeout_s=10) for o in range(2)]
        monkeypatch.setattr(backends, "broadcast", lambda *_: None)
        with pytest.raises(TransferError, match="slices did not come or differ"):
            Receiver().receive(where, manifest(), timeout_s=20.0)
        for future in groups:
            future.result().close()


def test_senders_that_never_come_fail_by_the_deadline_of_the_whole(store: dist.TCPStore) -> None:
    began = time.monotonic()
    with pytest.raises(TransferError, match="trainer rank 0, trainer rank 1 did not appear in time"):
        Receiver().receive(spec(store, timeout_s=60.0), manifest(), timeout_s=1.0)
    assert time.monotonic() - began < 20


def test_discard_gives_a_blocked_receive_up_at_once_and_the_next_one_works(store: dist.TCPStore) -> None:
    landing, began = Landing(), time.monotonic()
    landing.begin_receive(spec(store, "dead", 60.0).SerializeToString(), manifest(6).SerializeToString(), 60.0)
    time.sleep(0.2)
    landing.discard()
    assert landing.state().phase == "empty" and time.monotonic() - began < 20
    time.sleep(0.6)  # the abandoned thread ends meanwhile, unheard
    assert landing.state().phase == "empty"
    where = spec(store, "live")
    with ThreadPoolExecutor(2) as pool:
        sending = [pool.submit(send, where, owner) for owner in range(2)]
        landing.begin_receive(where.SerializeToString(), manifest().SerializeToString(), 20.0)
        assert ended(landing) == "ready" and received(landing) == CONTENT.tolist()
        for future in sending:
            future.result().close()


def test_a_manifest_of_another_model_is_refused_before_any_group_is_made(store: dist.TCPStore) -> None:  # faults.md 6
    landing = Landing(expected=[("model.w", (4, 2))])
    with pytest.raises(TransferError, match="0 of 1 names match; missing: model.w; unknown: w"):
        landing.begin_receive(spec(store).SerializeToString(), manifest().SerializeToString(), 5.0)
    assert landing.state().phase == "empty"


def test_chunks_land_as_well_and_only_the_version_asked_for_is_handed_over() -> None:
    landing = Landing()
    landing.begin_chunks(manifest(9).SerializeToString())
    for index, (_, row) in enumerate(ORDER):
        landing.write_chunk(index, 0, CONTENT[8 * row : 8 * row + 8].tobytes())
    landing.finish_chunks()
    with pytest.raises(TransferError, match="version 8 is not ready to commit: ready version 9"):
        landing.take(8)
    assert received(landing, 9) == CONTENT.tolist()
    assert landing.state().phase == "empty"


def chunked(landing: Landing, version: int) -> None:
    landing.begin_chunks(manifest(version).SerializeToString())
    for index, (_, row) in enumerate(ORDER):
        landing.write_chunk(index, 0, CONTENT[8 * row : 8 * row + 8].tobytes())


def test_a_version_is_made_ready_on_the_receiving_thread_and_handed_over_with_what_was_made(tmp_path: Path) -> None:
    # The engine's own thread asks for it between two steps: it must find everything done.
    seen = []

    def prepare(verified: VerifiedStaging, side: Side) -> str:
        seen.append((threading.current_thread().name, side.device.type, verified.version))
        return f"ready {verified.version}"

    (tmp_path / "rank-0.bin").write_bytes(b"".join(CONTENT[8 * row : 8 * row + 8].tobytes() for owner, row in ORDER if owner == 0))
    (tmp_path / "rank-1.bin").write_bytes(b"".join(CONTENT[8 * row : 8 * row + 8].tobytes() for owner, row in ORDER if owner == 1))
    landing = Landing(prepare=prepare)
    landing.begin_folder(str(tmp_path), manifest(9).SerializeToString())
    assert ended(landing) == "ready", landing.state().detail
    staging, prepared = landing.take_prepared(9)
    assert (staging.version, prepared, seen) == (9, "ready 9", [("weights-read", "cpu", 9)])


def test_a_version_that_cannot_be_made_ready_has_failed_and_is_not_handed_over() -> None:
    def prepare(verified: VerifiedStaging, side: Side) -> None:
        raise ValueError("version 9 brings model.extra, which the plan does not know")

    landing = Landing(prepare=prepare)
    chunked(landing, 9)
    with pytest.raises(ValueError, match=r"model\.extra"):
        landing.finish_chunks()
    assert landing.state().phase == "failed" and "model.extra" in landing.state().detail
    with pytest.raises(TransferError, match="version 9 is not ready to commit: failed"):
        landing.take(9)


def test_chunks_with_a_hole_fail_and_leave_nothing() -> None:
    landing = Landing()
    landing.begin_chunks(manifest().SerializeToString())
    landing.write_chunk(0, 0, CONTENT[:8].tobytes())
    with pytest.raises(TransferError, match="3 of 4 slices"):
        landing.finish_chunks()
    assert landing.state().phase == "failed"


def test_a_transport_without_groups_is_refused() -> None:
    with pytest.raises(TransferError, match="is none of gloo, nccl and ipc"):
        address(learner_pb2.GroupSpec(transport=learner_pb2.TRANSPORT_GRPC), [0])
