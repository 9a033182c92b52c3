"""Rows of a batch are put into messages without parsing them."""

from __future__ import annotations

import pytest

from learner.gateway import wire
from protos.learner.v1alpha1 import feed_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2

# Lengths whose varints take one, two and three bytes: below 128, below 16384, above.
ROWS = [trajectory_pb2.Trajectory(group_id="g", sample_index=index, text="x" * size) for index, size in enumerate((0, 100, 200, 16_000, 20_000))]


@pytest.mark.parametrize("rows", [[], ROWS[:1], ROWS])
def test_encoded_rows_are_what_protobuf_makes_of_them(rows: list[trajectory_pb2.Trajectory]) -> None:
    payloads = [row.SerializeToString() for row in rows]
    assert [feed_pb2.TakeBatchResponse.FromString(data) for data in wire.batch_rows(payloads, together=False)] == [feed_pb2.TakeBatchResponse(row=row) for row in rows]
    (data,) = wire.batch_rows(payloads, together=True)
    assert data == feed_pb2.TakeBatchResponse(rows=feed_pb2.Rows(rows=rows)).SerializeToString()
