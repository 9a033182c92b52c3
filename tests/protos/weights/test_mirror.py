"""Fetched bytes on this machine, deltas upon them, and what a shared folder may show half-written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import delta, folder
from protos.weights.errors import TransferError
from protos.weights.folder import Place
from protos.weights.history import History, Step, plan_of
from protos.weights.mirror import PREFIX, Mirror, sweep
from protos.weights.staging import digest, read_buckets

SIZE = 4096
ROOT = Path(__file__).resolve().parents[3]


def content(version: int) -> np.ndarray:
    """Two buckets' bytes; each version changes six words of the one before."""
    data = np.random.default_rng(1).integers(0, 255, SIZE, dtype=np.uint8)
    for step in range(2, version + 1):
        data.view(np.uint16)[np.random.default_rng(step).integers(0, SIZE // 2, 6)] = step
    return data


def manifest(version: int) -> manifest_pb2.Manifest:
    made, data = manifest_pb2.Manifest(version=version), content(version)
    made.tensors.add(name="w", shape=[SIZE // 2], dtype="bfloat16")
    for bucket, (start, size) in enumerate([(0, 1024), (1024, SIZE - 1024)]):
        made.buckets.add(owner=bucket, root=bucket, num_bytes=size)
        made.slices.add(tensor=0, tensor_offset=start, num_bytes=size, owner=bucket, bucket=bucket, digest=digest(data[start : start + size]))
    return made


def step(version: int) -> Step:
    """From the version before."""
    old, new, made = content(version - 1), content(version), manifest(version)
    halves = [(0, 1024), (1024, SIZE)]
    return Step(from_version=version - 1, to_version=version, parts=[part for b, (a, z) in enumerate(halves) for part in delta.parts(made, b, old[a:z].copy(), new[a:z].copy())])


def filled(mirror: Mirror, version: int) -> Mirror:
    mirror.open(manifest(version))
    data = content(version).tobytes()
    mirror.write(0, 0, data[:1000])
    mirror.write(0, 1000, data[1000:1024])
    mirror.write(1, 0, data[1024:])
    mirror.close()
    mirror.confirm()
    return mirror


def parts_of(steps: list[Step]) -> list[manifest_pb2.DeltaPart]:
    return [part for made in steps for part in made.parts]


def served(mirror: Mirror) -> bytes:
    ((_, tensor),) = read_buckets(mirror.folder, mirror.manifest).tensors()
    return tensor.view(dtype=torch.uint8).numpy().tobytes()


def test_a_full_copy_and_a_chain_upon_it_are_the_versions_byte_for_byte(tmp_path: Path) -> None:
    mirror = filled(Mirror(tmp_path / "m"), 1)
    assert served(mirror) == content(1).tobytes()
    steps = [step(2), step(3), step(4)]
    mirror.apply(manifest(4), plan_of(steps), parts_of(steps))
    assert mirror.version == 0  # until the engine has verified it
    mirror.confirm()
    assert (mirror.version, mirror.num_deltas) == (4, 3) and served(mirror) == content(4).tobytes()
    assert [made.to_version for made in mirror.history.chain(have_version=2, layout=mirror.layout, version=4)] == [3, 4]


def test_a_broken_delta_changes_nothing_and_the_version_held_stays(tmp_path: Path) -> None:
    mirror = filled(Mirror(tmp_path / "m"), 1)
    good = step(2)
    broken = [manifest_pb2.DeltaPart.FromString(part.SerializeToString()) for part in good.parts]
    broken[-1].data = broken[-1].data[:-1] + bytes([broken[-1].data[-1] ^ 4])
    for parts, why in ((broken, "differs from its digest"), (list(good.parts)[:-1], "ended after")):
        with pytest.raises(TransferError, match=why):
            mirror.apply(manifest(2), plan_of([good]), parts)
        assert mirror.version == 1 and served(mirror) == content(1).tobytes()


def test_after_an_uncertain_apply_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = filled(Mirror(tmp_path / "m"), 1)

    def breaks(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(delta, "apply_part", breaks)
    with pytest.raises(MemoryError):
        mirror.apply(manifest(2), plan_of([step(2)]), step(2).parts)
    assert (mirror.version, mirror.layout) == (0, 0)


def test_a_copy_that_ends_early_or_does_not_fit_is_no_version(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "m")
    mirror.open(manifest(1))
    mirror.write(0, 0, bytes(1024))
    with pytest.raises(TransferError, match="version 1 ended early: 1 of 2 buckets are not whole, the first is 1"):
        mirror.close()
    with pytest.raises(TransferError, match="chunk of bucket 1 at 8 with 2 bytes, but 0 of its 3072 bytes have come"):
        mirror.write(1, 8, b"ab")
    assert mirror.version == 0


def test_no_room_for_the_copy_is_an_error_with_the_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"a copy of the weights needs 4096 bytes, \d+ are free; give mirror_dir"):
        Mirror(tmp_path / "m").open(manifest(1))


def test_a_mirror_whose_process_is_gone_is_removed_and_a_living_one_s_stays(tmp_path: Path) -> None:
    living = filled(Mirror(tmp_path / f"{PREFIX}a-1"), 1)
    script = f"""
import os, pathlib
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.mirror import Mirror
Mirror(pathlib.Path({str(tmp_path)!r}) / "{PREFIX}b-1").open(manifest_pb2.Manifest(version=1, buckets=[manifest_pb2.Bucket(num_bytes=8)]))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode == 9
    assert sweep(tmp_path) == [f"{PREFIX}b-1"] and [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}a-1"]
    assert served(living) == content(1).tobytes()
    living.remove()
    assert not list(tmp_path.iterdir())


def test_a_history_offers_only_whole_chains_of_one_layout_and_forgets_what_costs_too_much() -> None:
    history, part = History(), manifest_pb2.DeltaPart(data=bytes(10))
    for version in range(2, 6):
        history.add(Step(from_version=version - 1, to_version=version, parts=[part]), layout=7, total_bytes=60)
    # Half a version is 30 bytes: three steps of 10.
    assert [made.to_version for made in history.chain(have_version=2, layout=7, version=5)] == [3, 4, 5]
    assert history.chain(have_version=1, layout=7, version=5) == [] == history.chain(have_version=2, layout=8, version=5) == history.chain(have_version=2, layout=7, version=6)
    history.add(Step(from_version=9, to_version=10, parts=[part]), layout=7, total_bytes=60)
    assert history.chain(have_version=4, layout=7, version=10) == [] and len(history.chain(have_version=9, layout=7, version=10)) == 1


def snapshot(at: Path, version: int) -> Path:
    at.mkdir(exist_ok=True)
    data = content(version)
    (at / "rank-0.bin").write_bytes(data[:1024].tobytes())
    (at / "rank-1.bin").write_bytes(data[1024:].tobytes())
    return at


@pytest.mark.parametrize("url", ["{}", "memory://{}"])
def test_published_versions_are_listed_once_whole_and_old_ones_go(url: str, tmp_path: Path) -> None:
    place = Place(url.format(tmp_path / "shared"))
    assert place.versions() == []
    for version in (1, 2, 3):
        folder.publish(place, snapshot(tmp_path / "s", version), manifest(version), step=step(version) if version > 1 else None, keep=2)
    assert place.versions() == [2, 3]
    index = folder.read_index(place, 3)
    assert sorted(index) == ["delta-2.bin", "manifest.bin", "rank-0.bin", "rank-1.bin"] and index["rank-1.bin"][0] == 3072
    assert folder.read_parts(place, 3, "delta-2.bin", index) == list(step(3).parts)


def test_a_marker_seen_before_the_bytes_is_refused_until_they_are_there(tmp_path: Path) -> None:  # faults.md 18
    place = Place(str(tmp_path / "shared"))
    folder.publish(place, snapshot(tmp_path / "s", 1), manifest(1))
    index, file = folder.read_index(place, 1), tmp_path / "shared" / "v1" / "rank-1.bin"
    whole, taken = file.read_bytes(), bytearray(3072)

    def take(at: int, data: bytes) -> None:
        taken[at : at + len(data)] = data

    for shown, why in ((whole[:-5], "3067 of 3072 bytes"), (whole[:-1] + bytes([whole[-1] ^ 1]), "or others than the index says"), (whole + b"x", "or others")):
        file.write_bytes(shown)
        with pytest.raises(TransferError, match=why):
            folder.checked(place, 1, "rank-1.bin", index, take)
    file.unlink()
    with pytest.raises(TransferError, match="rank-1.bin is not there; it is looked for again later"):
        folder.checked(place, 1, "rank-1.bin", index, take)
    file.write_bytes(whole)
    folder.checked(place, 1, "rank-1.bin", index, take)
    assert bytes(taken) == whole
    (tmp_path / "shared" / "v1" / "index.msgpack").write_bytes(b"\x81")
    with pytest.raises(TransferError, match=r"index.msgpack cannot be read"):
        folder.read_index(place, 1)


def test_a_url_that_nobody_can_open_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"push.folder=nosuch://x: .*give a folder, or a URL of an installed fsspec file system"):
        Place("nosuch://x")
