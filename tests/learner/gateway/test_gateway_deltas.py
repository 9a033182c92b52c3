"""Deltas, peers and the shared path through a real gateway."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np

from protos import rpc
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.weights.folder import Place
from protos.weights.mirror import Mirror
from rollout_server.weights.fetching import FolderSource, LearnerSource, serve
from tests.learner.gateway.gateway_harness import Actor, Trainer, config_in, running

SIZE = 40_000


def changed(data: bytes, seed: int) -> bytes:
    """One byte in two hundred is another."""
    values = np.frombuffer(data, dtype=np.uint8).copy()
    values[np.random.default_rng(seed).integers(0, SIZE, SIZE // 200)] ^= 7
    return values.tobytes()


def bytes_of(mirror: Mirror) -> bytes:
    return b"".join(mirror.read(index, 0, SIZE) for index in range(len(mirror.manifest.buckets)))


async def bring(source: LearnerSource | FolderSource, newest: int) -> bytes:
    """What lies here afterwards, taken for verified."""
    await asyncio.wait_for(source.bring(newest), 20)
    source.mirror.confirm()
    return bytes_of(source.mirror)


def source_of(actor: Actor, mirror: Mirror, **options: object) -> LearnerSource:
    return LearnerSource(mirror, lambda request: actor.stub.FetchWeights(request, timeout=20), **options)  # type: ignore[arg-type]


async def publish(trainer: Trainer, incarnation_of: list[int], data: bytes, shm: Path, address: str) -> Trainer:
    """The next version: a trainer that registers anew publishes its step 0 again."""
    incarnation_of[0] += 100
    again = Trainer(address, shm, incarnation=incarnation_of[0])
    await again.register()
    await again.close(0, data=data)
    return again


async def test_a_caller_that_says_what_it_has_gets_the_changes_and_every_so_often_everything(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor, count = Trainer(address, tmp_path / "shm"), Actor(address, config), [100]
        await trainer.register()
        versions = [os.urandom(SIZE)]
        await trainer.close(0, data=versions[0])
        source = source_of(actor, Mirror(tmp_path / "mirror"), anchor_every=3)
        assert await bring(source, 1) == versions[0]
        for seed in range(4):
            versions.append(changed(versions[-1], seed))
            await publish(trainer, count, versions[-1], tmp_path / "shm", address)
            assert await bring(source, len(versions)) == versions[-1]
        # Full, three deltas, and a full anchor again.
        assert (source.stats.num_full, source.stats.num_deltas) == (2, 3)
        assert source.stats.num_bytes < 2 * SIZE + 3 * SIZE / 40  # 200 changes of one byte, 57 of them far: 4 + 200 * 2 + 57 * 8
        await actor.leave()


async def test_a_chain_leads_over_versions_that_were_missed_and_after_a_doubt_all_is_sent(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor, count = Trainer(address, tmp_path / "shm"), Actor(address, config), [100]
        await trainer.register()
        data = os.urandom(SIZE)
        await trainer.close(0, data=data)
        quick, slow = source_of(actor, Mirror(tmp_path / "a")), source_of(actor, Mirror(tmp_path / "b"))
        assert await bring(quick, 1) == await bring(slow, 1) == data
        for seed in range(3):
            data = changed(data, seed)
            await publish(trainer, count, data, tmp_path / "shm", address)
            assert await bring(quick, 2 + seed) == data
        assert await bring(slow, 4) == data and slow.stats.num_deltas == 3 and slow.stats.num_full == 1
        slow.mirror.doubt()
        assert await bring(slow, 4) == data and slow.stats.num_full == 2
        await actor.leave()


class Giver(rollout_pb2_grpc.RolloutServiceServicer):
    """A replica's FetchWeights alone."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror, self.calls = mirror, 0

    async def FetchWeights(self, request: rollout_pb2.FetchWeightsRequest, context: object) -> object:
        self.calls += 1
        async for response in serve(self.mirror, request.have_version, request.have_layout):
            yield response


async def test_weights_come_from_a_peer_that_has_them_and_from_the_learner_when_it_is_gone(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, first, second = Trainer(address, tmp_path / "shm"), Actor(address, config, "a"), Actor(address, config, "b")
        await trainer.register()
        data = os.urandom(SIZE)
        await trainer.close(0, data=data)
        held = source_of(first, Mirror(tmp_path / "a"))
        assert await bring(held, 1) == data
        giver = Giver(held.mirror)
        server = rpc.Server("127.0.0.1:0", [lambda s: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(giver, s)])
        await server.start()
        first.hello.address, first.hello.serves_weights = f"127.0.0.1:{server.port}", True
        await first.attend(loaded_version=1)
        await asyncio.sleep(0.1)
        source = source_of(second, Mirror(tmp_path / "b"), peers=True)
        assert await bring(source, 1) == data and (giver.calls, source.stats.num_from_peers) == (1, 1)
        held.mirror.announced.version = 0  # what a push has overtaken there
        source.mirror.doubt()
        assert await bring(source, 1) == data and (giver.calls, source.stats.num_from_peers) == (2, 1)
        await server.stop(0)
        source.mirror.doubt()
        assert await bring(source, 1) == data and (giver.calls, source.stats.num_from_peers) == (2, 1)
        for actor in (first, second):
            await actor.leave()


async def test_versions_reach_a_fleet_that_only_sees_the_shared_path(tmp_path: Path) -> None:
    config = config_in(tmp_path, push={"transport": "folder", "folder": str(tmp_path / "shared")})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, count = Trainer(address, tmp_path / "shm", world_size=2), [100]
        await trainer.register()
        data = os.urandom(SIZE)
        await trainer.close(0, data=data)
        source = FolderSource(Mirror(tmp_path / "mirror"), Place(str(tmp_path / "shared")), poll_s=0.05)
        assert await bring(source, 1) == data + data  # both ranks' files
        one = await publish(trainer, count, data, tmp_path / "shm", address)
        assert await bring(source, 2) == data  # another layout: everything
        data = changed(data, 5)
        await publish(one, count, data, tmp_path / "shm", address)
        assert await bring(source, 3) == data and (source.stats.num_full, source.stats.num_deltas) == (2, 1)
