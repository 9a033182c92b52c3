"""Deltas over a network with 100 ms of delay and 1 % of the packets lost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.learner.gateway import lossy_link
from tests.learner.gateway.gateway_harness import Trainer, config_in, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.skipif(not lossy_link.possible(), reason="a lossy link needs root and /dev/net/tun")]
ROOT = Path(__file__).resolve().parents[3]
SIZE = 1 << 20


async def test_a_far_replica_follows_by_deltas_that_are_exact_and_a_fortieth_of_the_bytes(tmp_path: Path) -> None:
    data = np.frombuffer(os.urandom(SIZE), dtype=np.uint8).copy()
    with lossy_link.lossy_link(delay_s=0.05, loss=0.01, seed=7) as link:  # a round trip takes 100 ms
        async with running(config_in(tmp_path, address=f"{link.host}:0", security={"off": ["tls", "token"]})) as gateway:
            address, answers = f"{link.host}:{gateway.port}", []
            command = [*link.enter, sys.executable, "-m", "tests.learner.gateway.far_replica", address, str(tmp_path / "mirror")]
            far = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
            assert far.stdin is not None and far.stdout is not None
            try:
                for version in range(1, 5):
                    trainer = Trainer(address, tmp_path / "shm", incarnation=100 * version)
                    await trainer.register()
                    await trainer.close(0, data=data.tobytes())
                    far.stdin.write(f"{version}\n".encode())
                    answers.append(json.loads(await asyncio.wait_for(far.stdout.readline(), 120)))
                    assert answers[-1]["digest"] == xxhash.xxh3_64_hexdigest(data.tobytes())
                    data[np.random.default_rng(version).choice(SIZE, SIZE // 200, replace=False)] ^= 5
            finally:
                far.kill()
                await far.wait()
    print(answers, {"packets": link.carried[0], "lost": link.carried[1]})
    assert link.carried[1] > 0
    assert (answers[-1]["full"], answers[-1]["deltas"]) == (1, 3) and answers[0]["bytes"] == SIZE
    assert all(answer["bytes"] < SIZE / 40 for answer in answers[1:])
