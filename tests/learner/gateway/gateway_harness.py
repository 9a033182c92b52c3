"""A gateway in this process or as a child, and fake actors and trainers that talk to it over loopback gRPC. No torch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer, models, pre_tokenizers

from learner.config import LearnerConfig
from learner.gateway.gateway import Gateway
from protos import rpc
from protos.arrays import pack_floats, pack_ids
from protos.identity import CONTRACT, template_digest, tokenizer_digest, weights_digest
from protos.learner.v1alpha1 import feed_pb2, feed_pb2_grpc, learner_pb2, learner_pb2_grpc
from protos.manifest.v1alpha1 import manifest_pb2
from protos.rollout.v1alpha1 import rollout_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 32


def model_in(folder: Path) -> Path:
    """A folder with all that a gateway reads of a model: 32 words, 64 positions; the weights are never loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": 64, "eos_token_id": 1}))
    (folder / "model.safetensors").write_bytes(b"not read, only digested")
    return folder


def config_in(folder: Path, *, num_prompts: int = 50, **changes: Any) -> LearnerConfig:
    """P = 2 groups of G = 2 samples a step; short clocks. `changes` are top-level keys of LearnerConfig."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{2 + n % 30} w3", "answer": n}) + "\n" for n in range(num_prompts)))
    values: dict[str, Any] = {
        "run_dir": folder / "run",
        "run_id": "r1",
        "model": str(model_in(folder / "model")),
        "address": "127.0.0.1:0",
        "steps": 10,
        "groups_per_step": 2,
        "data": {"prompts": prompts, "template": "raw", "shuffle": False},
        "sampling": {"group_size": 2, "max_new_tokens": 8},
        "lease": {"heartbeat_s": 0.1, "silence_s": 1.0, "lapse_s": 30.0},
        "push": {"transport": "gloo", "prepare_s": 0.4, "collective_timeout_s": 2.0, "deadline_s": 4.0},
    }
    return LearnerConfig.model_validate({**values, **changes})


@asynccontextmanager
async def running(config: LearnerConfig) -> AsyncIterator[Gateway]:
    """A gateway in this process."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    gateway = Gateway(config, Path(config.model), config.run_id)
    stopping = asyncio.Event()
    task = asyncio.create_task(gateway.run(stopping))
    try:
        while not gateway.port and not task.done():
            await asyncio.sleep(0.005)
        yield gateway
    finally:
        stopping.set()
        await task


class Child:
    """A gateway process that can be killed and started again on the same port."""

    def __init__(self, config: LearnerConfig) -> None:
        self.config_path = config.run_dir / "learner.json"
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self._config = config
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, fault: str = "") -> str:
        """Its address once it says SERVING."""
        self.config_path.write_text(self._config.model_dump_json())
        (self._config.run_dir / "gateway.address").unlink(missing_ok=True)
        environment = {**os.environ, "HEADRACE_FAULT": fault}
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-m", "learner.gateway", "--config", str(self.config_path), cwd=ROOT, env=environment, stderr=asyncio.subprocess.DEVNULL)
        path = self._config.run_dir / "gateway.address"
        while not path.exists():
            assert self.process.returncode is None, "the gateway ended before it served"
            await asyncio.sleep(0.02)
        address = path.read_text().strip()
        async with rpc.channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while (await health.Check(health_pb2.HealthCheckRequest())).status != health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.02)
        self._config = self._config.model_copy(update={"address": address})
        return address

    def processor_s(self) -> float:
        """Processor time that it has taken since its start."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def killed(self) -> None:
        """Waits until it was killed by a signal."""
        assert self.process is not None
        assert await asyncio.wait_for(self.process.wait(), 20) == -signal.SIGKILL

    async def stop(self) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), 20)


class Actor:
    """One fake replica. `orders` fills with what the gateway sends down."""

    def __init__(self, address: str, config: LearnerConfig, replica_id: str = "a", incarnation: int = 1, **claims: Any) -> None:
        self.address, self.config = address, config
        self.channel = rpc.channel(address)
        self.stub = learner_pb2_grpc.LearnerServiceStub(self.channel)
        folder = Path(config.model)
        self.replica_id, self.incarnation = replica_id, incarnation
        fields: dict[str, Any] = {
            "replica_id": replica_id, "incarnation": incarnation, "contract": CONTRACT, "base_weights_digest": weights_digest(folder),
            "tokenizer_digest": tokenizer_digest(folder), "template_digest": template_digest(folder), "served_dtype": "float32",
            "max_model_len": 64, "transports": [learner_pb2.TRANSPORT_GLOO, learner_pb2.TRANSPORT_GRPC],
        }  # fmt: skip
        self.hello = learner_pb2.Hello(**{**fields, **claims})
        self.orders: asyncio.Queue[learner_pb2.AttendResponse] = asyncio.Queue()
        self.call: Any = None
        self.run_id = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._writing = asyncio.Lock()  # a stream takes one write at a time

    async def attend(self, *, loaded_version: int = 1, beating: bool = True) -> learner_pb2.Welcome:
        """Says hello; then heartbeats with `loaded_version` go up for ever. Raises AioRpcError when refused."""
        self.call = self.stub.Attend()
        await self.call.write(learner_pb2.AttendRequest(hello=self.hello))
        first = await self.call.read()
        if first is grpc.aio.EOF:
            raise await failure(self.call)
        self.run_id = first.welcome.run_id
        await self.beat(loaded_version)
        self._tasks = [asyncio.create_task(self._read())]
        if beating:
            self._tasks.append(asyncio.create_task(self._beat(loaded_version)))
        return first.welcome

    async def beat(self, loaded_version: int, **fields: Any) -> None:
        state = rollout_pb2.REPLICA_STATE_SERVING if loaded_version else rollout_pb2.REPLICA_STATE_WAITING
        beat = learner_pb2.Heartbeat(**{"state": state, "loaded_version": loaded_version, **fields})
        await self.write(learner_pb2.AttendRequest(heartbeat=beat))

    async def report(self, epoch: int, version: int, phase: learner_pb2.UpdatePhase, detail: str = "") -> None:
        report = learner_pb2.UpdateReport(epoch=epoch, version=version, phase=phase, detail=detail, state=rollout_pb2.REPLICA_STATE_SERVING)
        await self.write(learner_pb2.AttendRequest(update_report=report))

    async def write(self, message: learner_pb2.AttendRequest) -> None:
        async with self._writing:
            await self.call.write(message)

    async def order(self, kind: str) -> Any:
        """The next order of a kind; others are skipped."""
        while True:
            order = await asyncio.wait_for(self.orders.get(), 60)
            if order.WhichOneof("message") == kind:
                return getattr(order, kind)

    async def lease(self, max_groups: int = 1, wait_s: float = 5.0) -> list[learner_pb2.Lease]:
        request = learner_pb2.LeaseGroupsRequest(replica_id=self.replica_id, incarnation=self.incarnation, max_groups=max_groups, wait_s=wait_s)
        return list((await self.stub.LeaseGroups(request, timeout=30)).leases)

    async def submit(self, *trajectories: trajectory_pb2.Trajectory, run_id: str = "r1") -> list[learner_pb2.SubmitTrajectoriesResponse]:
        """Receipts of all, in order. Raises AioRpcError."""
        call = self.stub.SubmitTrajectories(timeout=30)
        for trajectory in trajectories:
            await call.write(learner_pb2.SubmitTrajectoriesRequest(run_id=run_id, trajectory=trajectory))
        await call.done_writing()
        return [receipt async for receipt in call]

    async def fulfil(self, lease: learner_pb2.Lease, version: int = 1, rewards: tuple[float, ...] = (0.0, 1.0)) -> list[int]:
        """Submits all samples of a lease; the receipts' statuses."""
        receipts = await self.submit(*(sample(lease, index, version, reward=reward) for index, reward in enumerate(rewards)))
        return [receipt.status for receipt in receipts]

    async def fulfil_as(self, lease: learner_pb2.Lease, run_id: str, version: int) -> None:
        """`fulfil` in a run of another name."""
        await self.submit(*(sample(lease, index, version, reward=float(index)) for index in range(lease.group_size)), run_id=run_id)

    async def leave(self) -> None:
        """Breaks the stream and closes the channel."""
        for task in self._tasks:
            task.cancel()
        if self.call is not None:
            self.call.cancel()
        await self.channel.close()

    async def _read(self) -> None:
        try:
            while (order := await self.call.read()) is not grpc.aio.EOF:
                await self.orders.put(order)
        except grpc.aio.AioRpcError:
            pass  # how the stream ended is asked of the call

    async def _beat(self, loaded_version: int) -> None:
        try:
            while not self.call.done():
                await self.beat(loaded_version)
                await asyncio.sleep(0.1)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the stream has ended


class Trainer:
    """Fake ranks of one incarnation; `snapshots` is where they write versions."""

    def __init__(self, address: str, snapshots: Path, incarnation: int = 100, world_size: int = 1) -> None:
        self.channel = rpc.channel(address)
        self.stub = feed_pb2_grpc.FeedServiceStub(self.channel)
        self.snapshots, self.incarnation, self.world_size = snapshots, incarnation, world_size

    async def register(self) -> feed_pb2.RegisterResponse:
        requests = [feed_pb2.RegisterRequest(incarnation=self.incarnation, rank=rank, world_size=self.world_size) for rank in range(self.world_size)]
        answers = await asyncio.gather(*(self.stub.Register(request, timeout=20, wait_for_ready=True) for request in requests))
        return answers[0]

    async def take(self, step: int, rank: int = 0, timeout_s: float = 20.0) -> tuple[feed_pb2.BatchHeader, list[trajectory_pb2.Trajectory]]:
        call = self.stub.TakeBatch(feed_pb2.TakeBatchRequest(incarnation=self.incarnation, rank=rank, policy_step=step), timeout=timeout_s, wait_for_ready=True)
        messages = [message async for message in call]
        return messages[0].header, [message.row for message in messages[1:]]

    async def take_end(self, step: int, run_dir: Path) -> feed_pb2.BatchHeader:
        """The header after the cut that a run ends with."""
        header, rows = await self.take(step)
        assert header.save_first and not rows and not header.end_of_run, header
        await self.save(step, run_dir)
        return (await self.take(step))[0]

    async def close(self, step: int, *, will_save: bool = False, data: bytes = b"weights!") -> feed_pb2.CloseBatchResponse:
        folder = snapshot_in(self.snapshots / f"{self.incarnation}-{step}", [data] * self.world_size)
        request = feed_pb2.CloseBatchRequest(incarnation=self.incarnation, policy_step=step, snapshot_dir=str(folder), will_save=will_save)
        return await self.stub.CloseBatch(request, timeout=20, wait_for_ready=True)

    async def save(self, step: int, run_dir: Path) -> str:
        source = run_dir / "checkpoints" / f"step-{step:06d}.tmp"
        source.mkdir(parents=True, exist_ok=True)
        (source / "rank0.distcp").write_bytes(b"model of step %d" % step)
        request = feed_pb2.SaveCutRequest(incarnation=self.incarnation, policy_step=step, cut_dir=str(source))
        return str((await self.stub.SaveCut(request, timeout=20)).cut_dir)

    async def begin(self, version: int, attempt: int = 0, rank: int = 0) -> feed_pb2.BeginUpdateResponse:
        request = feed_pb2.BeginUpdateRequest(incarnation=self.incarnation, rank=rank, version=version, attempt=attempt, store_host="127.0.0.1", store_port=1)
        return await self.stub.BeginUpdate(request, timeout=20)

    async def end(self, epoch: int, *, ok: bool = True, rank: int = 0) -> feed_pb2.EndUpdateResponse:
        return await self.stub.EndUpdate(feed_pb2.EndUpdateRequest(incarnation=self.incarnation, rank=rank, epoch=epoch, ok=ok), timeout=20)


def snapshot_in(folder: Path, ranks: list[bytes]) -> Path:
    """A snapshot whose rank r owns one bucket with `ranks[r]`."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, data in enumerate(ranks):
        (folder / f"rank-{rank}.bin").write_bytes(data)
    buckets = [manifest_pb2.Bucket(owner=rank, num_bytes=len(data), file_offset=0) for rank, data in enumerate(ranks)]
    (folder / "manifest.bin").write_bytes(manifest_pb2.Manifest(buckets=buckets).SerializeToString())
    return folder


def sample(lease: learner_pb2.Lease, index: int, version: int, *, reward: float | None = 1.0, num_tokens: int = 3, **changes: Any) -> trajectory_pb2.Trajectory:
    """A well-formed trajectory of `num_tokens` tokens, all drawn by one version. reward None: unscored."""
    unscored = trajectory_pb2.Unscored(reason=trajectory_pb2.UNSCORED_REASON_TIMEOUT)
    fields: dict[str, Any] = {
        "group_id": lease.group_id,
        "sample_index": index,
        "prompt_ids": lease.prompt_ids,
        "completion_ids": pack_ids([5] * num_tokens),
        "logprobs": pack_floats([-0.5] * num_tokens),
        "spans": [trajectory_pb2.VersionSpan(version=version, start=0, end=num_tokens)],
        "finish_reason": trajectory_pb2.FINISH_REASON_STOP,
        "reward": trajectory_pb2.Reward(unscored=unscored) if reward is None else trajectory_pb2.Reward(score=trajectory_pb2.Score(value=reward)),
    }
    return trajectory_pb2.Trajectory(**{**fields, **changes})


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ended with."""
    return grpc.aio.AioRpcError(await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details())


async def eventually(condition: Any, limit_s: float = 60.0) -> None:
    """Until an async or plain condition holds."""
    end = asyncio.get_running_loop().time() + limit_s
    while True:
        value = condition()
        if await value if asyncio.iscoroutine(value) else value:
            return
        assert asyncio.get_running_loop().time() < end, "did not come true"
        await asyncio.sleep(0.02)
