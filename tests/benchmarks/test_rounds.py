"""One round of each side of `stream`: what was sent is what came out, and the journal says how it was synced."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import stream
from rollout_server.submitting import together


@pytest.mark.timeout(120)
async def test_a_round_of_ours_and_of_raw_grpc_brings_every_sample(tmp_path: Path) -> None:
    async with stream.ours(tmp_path / "ours") as ours, stream.raw(tmp_path / "raw") as raw:
        await ours.prepare()
        messages = list(together(ours.samples))
        assert await ours.round() > 0  # raises unless the same bytes came back
        assert sum(len(batch) for batch in ours.syncs()) == stream.GROUPS * stream.GROUP_SIZE
        assert await raw.round(messages) > 0 and await raw.unary_round(messages[:2]) > 0
        await ours.prepare()  # the next step's groups can be had


def test_a_round_that_loses_a_sample_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 samples came out of 2"):
        stream.check([b"a"], [b"a", b"b"], "somebody")
