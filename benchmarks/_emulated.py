"""A real gateway process, and emulated replicas and trainer ranks that speak to it over loopback gRPC as the real ones do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks._line import ROOT
from learner.config import LearnerConfig
from learner.gateway.bell import Bell
from protos import rpc
from protos.identity import CONTRACT, template_digest, tokenizer_digest, weights_digest
from protos.learner.v1alpha1 import feed_pb2, feed_pb2_grpc, learner_pb2, learner_pb2_grpc
from protos.manifest.v1alpha1 import manifest_pb2
from protos.rollout.v1alpha1 import rollout_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.submitting import Finished, Submitting

VOCABULARY = 50_000
MODEL_TOKENS = 8192
RUN_ID = "bench"
SAMPLE_BYTES = 26 << 10


def model_in(folder: Path) -> Path:
    """A folder with all that a gateway reads of a model; the weights are never loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": MODEL_TOKENS, "eos_token_id": 1}))
    (folder / "model.safetensors").write_bytes(b"not read, only digested")
    return folder


def config_in(folder: Path, *, prompt_tokens: int = 256, num_prompts: int = 64, **changes: Any) -> LearnerConfig:
    """Configuration of a run in a folder. `changes` are top-level keys of LearnerConfig."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    words = " ".join(f"w{2 + index % 60}" for index in range(prompt_tokens - 1))
    prompts.write_text("".join(json.dumps({"prompt": f"w{2 + number % 60} {words}"}) + "\n" for number in range(num_prompts)))
    values: dict[str, Any] = {
        "run_dir": folder / "run",
        "run_id": RUN_ID,
        "model": str(model_in(folder / "model")),
        "address": "127.0.0.1:0",
        "steps": 1_000_000,
        "data": {"prompts": prompts, "template": "raw", "shuffle": False},
        "lease": {"heartbeat_s": 1.0, "silence_s": 60.0, "lapse_s": 600.0},
    }
    return LearnerConfig.model_validate({**values, **changes})


class GatewayProcess:
    """`python -m learner.gateway` as a child; `address` once it serves."""

    def __init__(self, config: LearnerConfig) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        path = config.run_dir / "learner.json"
        path.write_text(config.model_dump_json())
        self._address = config.run_dir / "gateway.address"
        self._address.unlink(missing_ok=True)
        self._log = config.run_dir / "gateway.log"
        with self._log.open("ab") as output:
            self.process = subprocess.Popen([sys.executable, "-m", "learner.gateway", "--config", str(path)], cwd=ROOT, env=environment(), stdout=output, stderr=output)
        wait_for(self._address, self.process, self._log)
        self.address = self._address.read_text().strip()

    def cpu_s(self) -> float:
        """Processor seconds of the process so far."""
        return cpu_s(self.process.pid)

    def stop(self) -> None:
        stop(self.process)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path, limit_s: float = 60.0) -> None:
    """Until a process has made a file. Raises RuntimeError with its log."""
    end_s = time.monotonic() + limit_s
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end_s:
            stop(process)
            raise RuntimeError(f"{process.args!r} did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.01)


@contextmanager
def child(command: Sequence[str], ready: Path, log: Path) -> Iterator[None]:
    """A process from when it has made `ready` to the end of the block. Raises RuntimeError with its log when it does not start."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=output)
    try:
        wait_for(ready, process, log)
        yield
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    """User and system seconds of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def gateway(config: LearnerConfig) -> Iterator[GatewayProcess]:
    process = GatewayProcess(config)
    try:
        yield process
    finally:
        process.stop()


class Replica:
    """One emulated replica: attends, leases, submits by the real client."""

    def __init__(self, address: str, config: LearnerConfig, replica_id: str = "a") -> None:
        self._channel = rpc.channel(address)
        self.stub = learner_pb2_grpc.LearnerServiceStub(self._channel)
        self.submitting = Submitting(self._channel)
        self.replica_id = replica_id
        self.loaded_version = 0
        self.incarnation = time.time_ns()
        folder = Path(config.model)
        self._hello = learner_pb2.Hello(
            replica_id=replica_id, incarnation=self.incarnation, contract=CONTRACT, base_weights_digest=weights_digest(folder),
            tokenizer_digest=tokenizer_digest(folder), template_digest=template_digest(folder), served_dtype="float32",
            max_model_len=MODEL_TOKENS, transports=[learner_pb2.TRANSPORT_GRPC],
        )  # fmt: skip
        self._heartbeat_s = config.lease.heartbeat_s
        self._tasks: list[asyncio.Task[None]] = []

    async def attend(self) -> None:
        """Returns once the gateway has welcomed it; versions count as loaded as soon as they are heard of."""
        call = self.stub.Attend(wait_for_ready=True)
        await call.write(learner_pb2.AttendRequest(hello=self._hello))
        welcome = await call.read()
        if welcome is grpc.aio.EOF:
            raise RuntimeError(f"replica {self.replica_id} was refused: {await call.details()}")
        self._changed = asyncio.Event()
        self._news = Bell()
        self._load(welcome.welcome.newest_version)
        self._tasks = [asyncio.create_task(part) for part in (self._orders(call), self._beats(call), self.submitting.run())]
        for task in self._tasks:
            task.add_done_callback(end_process_on_failure)

    async def lease(self, num_groups: int, wait_s: float = 10.0) -> list[learner_pb2.Lease]:
        """As many leases as asked for, in several calls if need be; returns once the least version of all is loaded."""
        leases: list[learner_pb2.Lease] = []
        while len(leases) < num_groups:
            request = learner_pb2.LeaseGroupsRequest(replica_id=self.replica_id, incarnation=self.incarnation, max_groups=num_groups - len(leases), wait_s=wait_s)
            leases += (await self.stub.LeaseGroups(request)).leases
        while self.loaded_version < max(lease.least_version for lease in leases):
            await self._news.wait()  # published a moment ago; the order is on its way
        return leases

    async def submit(self, sample: Finished) -> None:
        """Raises RuntimeError unless the sample is accepted."""
        receipt = await self.submitting.submit(sample)
        if receipt.status != learner_pb2.RECEIPT_STATUS_ACCEPTED:
            raise RuntimeError(f"sample ({receipt.group_id}, {receipt.sample_index}) was not accepted: {receipt}")

    async def leave(self) -> None:
        for task in self._tasks:
            task.remove_done_callback(end_process_on_failure)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    def _load(self, version: int) -> None:
        self.loaded_version = max(version, self.loaded_version)
        self._changed.set()
        self._news.ring()

    async def _orders(self, call: Any) -> None:
        while (order := await call.read()) is not grpc.aio.EOF:
            if order.HasField("published"):
                self._load(order.published.version)

    async def _beats(self, call: Any) -> None:
        while True:
            self._changed.clear()
            state = rollout_pb2.REPLICA_STATE_SERVING if self.loaded_version else rollout_pb2.REPLICA_STATE_WAITING
            await call.write(learner_pb2.AttendRequest(heartbeat=learner_pb2.Heartbeat(state=state, loaded_version=self.loaded_version, num_free=1)))
            try:
                await asyncio.wait_for(self._changed.wait(), self._heartbeat_s)
            except TimeoutError:
                pass  # nothing new: the beat is due


class Rank:
    """One emulated trainer rank, alone in its world."""

    def __init__(self, address: str, folder: Path) -> None:
        """folder: that of `config_in`."""
        self._channel = rpc.channel(address)
        self.stub = feed_pb2_grpc.FeedServiceStub(self._channel)
        self._folder, self._checkpoints = folder / "snapshots", folder / "run" / "checkpoints"
        self.incarnation = time.time_ns()

    async def register(self) -> None:
        """On duty, with the policy it starts from published."""
        await self.stub.Register(feed_pb2.RegisterRequest(incarnation=self.incarnation, rank=0, world_size=1), wait_for_ready=True)
        await self.close(0)

    async def take(self, step: int) -> tuple[feed_pb2.BatchHeader, list[trajectory_pb2.Trajectory]]:
        """The batch of a step: what came first and the rows, cuts made in between where the gateway wants one first. Raises RuntimeError when
        rows are missing, or the gateway orders to leave: nobody stops an emulated rank."""
        while True:
            header, rows = await self._take(step)
            if header.leave:
                raise RuntimeError(f"the gateway ordered this rank to leave at step {step}")
            if not header.save_first:
                return header, rows
            await self.save(step)

    async def save(self, policy_step: int) -> None:
        """A cut of eight bytes; the gateway takes the suffix away when it marks it."""
        source = self._checkpoints / f"step-{policy_step:06d}.tmp"
        source.mkdir(parents=True)
        (source / "rank-0.bin").write_bytes(b"weights!")
        await self.stub.SaveCut(feed_pb2.SaveCutRequest(incarnation=self.incarnation, policy_step=policy_step, cut_dir=str(source)))

    async def _take(self, step: int) -> tuple[feed_pb2.BatchHeader, list[trajectory_pb2.Trajectory]]:
        header: feed_pb2.BatchHeader | None = None
        rows: list[trajectory_pb2.Trajectory] = []
        async for message in self.stub.TakeBatch(feed_pb2.TakeBatchRequest(incarnation=self.incarnation, rank=0, policy_step=step, rows_bytes=1 << 20)):
            if message.HasField("header"):
                header = message.header
            else:
                rows.extend(message.rows.rows)
        if header is None or header.num_rows != len(rows):
            raise RuntimeError(f"the batch of step {step} brought {len(rows)} rows: {header}")
        return header, rows

    async def close(self, policy_step: int) -> int:
        """Publishes a policy of eight bytes; its version."""
        folder = self._folder / f"{self.incarnation}-{policy_step}"
        folder.mkdir(parents=True)
        (folder / "rank-0.bin").write_bytes(b"weights!")
        manifest = manifest_pb2.Manifest(buckets=[manifest_pb2.Bucket(owner=0, num_bytes=8, file_offset=0)])
        (folder / "manifest.bin").write_bytes(manifest.SerializeToString())
        request = feed_pb2.CloseBatchRequest(incarnation=self.incarnation, policy_step=policy_step, snapshot_dir=str(folder), will_save=False)
        return int((await self.stub.CloseBatch(request)).version)

    async def leave(self) -> None:
        await self._channel.close()


def end_process_on_failure(task: asyncio.Task[None]) -> None:
    """A part that fails ends its process, so that nothing waits for it for ever."""
    if not task.cancelled() and (error := task.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


def finished(leases: Sequence[learner_pb2.Lease], samples: Sequence[trajectory_pb2.Trajectory], version: int) -> list[Finished]:
    """Finished samples of all groups, ready to be submitted: the given ones in turn, under the leases' names."""
    made: list[Finished] = []
    for lease in leases:
        for index in range(lease.group_size):
            trajectory = trajectory_pb2.Trajectory()
            trajectory.CopyFrom(samples[len(made) % len(samples)])
            trajectory.group_id, trajectory.sample_index = lease.group_id, index
            trajectory.prompt_ids.CopyFrom(lease.prompt_ids)
            trajectory.spans[0].version = version
            made.append(Finished(run_id=RUN_ID, lease_id=lease.lease_id, group_id=lease.group_id, sample_index=index, trajectory=trajectory.SerializeToString()))
    return made
