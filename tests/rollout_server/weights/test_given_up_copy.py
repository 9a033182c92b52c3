"""A reading thread whose fetch was given up at its deadline does not write into the next copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError
from protos.weights.mirror import Mirror
from rollout_server.weights.fetching import Spread


def test_an_older_reader_hears_that_another_copy_has_begun_before_it_writes(tmp_path: Path) -> None:
    mirror, manifest = Mirror(tmp_path / "mirror"), manifest_pb2.Manifest(version=4, buckets=[manifest_pb2.Bucket(num_bytes=4)])
    mirror.open(manifest)
    older = Spread(mirror, manifest, 0)
    older.take(0, b"ab")
    mirror.open(manifest)
    newer = Spread(mirror, manifest, 0)
    with pytest.raises(TransferError, match="this copy was given up, another one has begun"):
        older.take(0, b"xx")
    newer.take(0, b"cdef")
    mirror.close()
    assert mirror.read(0, 0, 4) == b"cdef"
    mirror.remove()
