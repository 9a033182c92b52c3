"""Whole rollout servers that get their weights without a push: from a shared path, from a learner, and from one another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from learner.weights.snapshot import SnapshotWriter
from protos.arrays import pack_ids, unpack
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.manifest.v1alpha1 import manifest_pb2
from protos.rollout.v1alpha1 import rollout_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2
from protos.weights import folder
from protos.weights.folder import Place
from tests.rollout_server import reference
from tests.rollout_server.conftest import Running, Start
from tests.rollout_server.fakes import FakeLearner, FakeReward

PROMPT = [65, 66, 67, 68]


async def until(question: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not question():
            await asyncio.sleep(0.02)


async def logprobs_are_of(running: Running, model: Path) -> bool:
    sampling = trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=6, seed=5)
    answers = [answer async for answer in running.stub.Generate(rollout_pb2.GenerateRequest(prompt_ids=pack_ids(PROMPT), sampling=sampling), timeout=20)]
    ids = [int(token) for answer in answers for token in unpack(answer.token_ids)]
    values = [float(value) for answer in answers for value in unpack(answer.logprobs)]
    return reference.largest_difference(values, reference.logprobs(reference.load(model), PROMPT, ids)) < 1e-4


def publish(place: Place, model: Path, root: Path, version: int) -> None:
    """What a learner does with a snapshot of these weights."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = SnapshotWriter(net, root=root, incarnation=1, served_dtype="float32", bucket_bytes=100_000).write(version)
    manifest = manifest_pb2.Manifest.FromString((made.folder / "manifest.bin").read_bytes())
    manifest.version = version
    folder.publish(place, made.folder, manifest)


async def test_a_server_without_a_learner_serves_the_newest_version_on_the_shared_path(start: Start, tiny_model: Path, other_model: Path, tmp_path: Path) -> None:
    place = Place(str(tmp_path / "shared"))
    running = await start(weights_folder=str(tmp_path / "shared"), mirror_dir=str(tmp_path / "mirrors"))
    assert await logprobs_are_of(running, tiny_model)  # nothing is published: the base weights
    publish(place, other_model, tmp_path / "shm", 3)
    await until(lambda: running.engine.loaded_version == 3)
    assert await logprobs_are_of(running, other_model)
    publish(place, tiny_model, tmp_path / "shm", 4)
    await until(lambda: running.engine.loaded_version == 4)
    assert await logprobs_are_of(running, tiny_model)


class LearnerThatKnowsPeers(FakeLearner):
    """Names the replicas that it was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.peers: list[str] = []
        self.num_whole = 0

    async def FetchWeights(self, request: pb.FetchWeightsRequest, context: object):
        if request.peers and self.peers:
            yield pb.FetchWeightsResponse(peers=pb.Peers(addresses=self.peers))
            return
        self.num_whole += 1
        async for answer in super().FetchWeights(request, context):
            yield answer


async def test_a_second_replica_takes_the_weights_from_the_first_and_from_the_learner_once_that_is_gone(start: Start, reward: FakeReward, other_model: Path, tmp_path: Path) -> None:
    learner = LearnerThatKnowsPeers()
    await learner.start()
    learner.publish(1, other_model)
    common = {"learner": f"127.0.0.1:{learner.port}", "rewards": (f"127.0.0.1:{reward.port}",), "peers": True, "mirror_dir": str(tmp_path)}
    first = await start(replica_id="a", **common)
    await until(lambda: first.engine.loaded_version == 1)
    assert learner.num_whole == 1 and learner.hellos[0].serves_weights
    learner.peers = ["127.0.0.1:1", first.service.address]  # the first one named is gone already
    second = await start(replica_id="b", **common)
    await until(lambda: second.engine.loaded_version == 1)
    assert learner.num_whole == 1 and await logprobs_are_of(second, other_model)
    learner.peers = ["127.0.0.1:1"]
    third = await start(replica_id="c", **common)
    await until(lambda: third.engine.loaded_version == 1)
    assert learner.num_whole == 2
    await learner.stop()
