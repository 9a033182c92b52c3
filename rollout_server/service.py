"""One rollout server put together: the engine, its plain service, and its part in a learner's run."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc

from protos import identity, rpc
from protos.exporting import Exporter
from protos.gpus import Gpus
from protos.learner.v1alpha1 import learner_pb2, learner_pb2_grpc
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.security import resolve
from protos.weights.folder import Place
from protos.weights.mirror import PREFIX, Mirror, sweep
from rollout_server.actor import Actor
from rollout_server.config import RolloutConfig
from rollout_server.endpoint.wiring import endpoint_of
from rollout_server.engine import Engine
from rollout_server.environments.hosts import episodes_of
from rollout_server.membership import Left, Membership
from rollout_server.metrics import FIGURES, Seen
from rollout_server.replica import CHECK_S, Replica
from rollout_server.reporting import Reporting
from rollout_server.scoring import Scoring
from rollout_server.servicer import RolloutServicer
from rollout_server.submitting import Submitting
from rollout_server.together import GroupScoring
from rollout_server.tokens import Tokens
from rollout_server.weights.driver import UpdateDriver
from rollout_server.weights.fetching import FolderSource, LearnerSource, Source

logger = logging.getLogger("headrace.rollout.service")

_ASK_AGAIN_S = 1.0
LIVE = "live"
HAND_BACK_S = 3.0
GRACE_S = 20.0  # for what runs, when the process is told to stop


class Service:
    """`serve` runs until the learner lets it go, or `stop` is called. Example: `await Service(config, folder, engine).serve()`."""

    def __init__(self, config: RolloutConfig, folder: Path, engine: Engine, *, address_file: Path | None = None) -> None:
        self._config = config
        self._folder = folder
        self._tokens = Tokens(folder)
        self._replica_id = config.replica_id or f"{socket.gethostname()}-{os.getpid()}"
        self._incarnation = time.time_ns()
        self._address_file = address_file
        self._stopping = asyncio.Event()
        self.replica = Replica(engine, attends=bool(config.learner), max_num_seqs=config.max_num_seqs * config.engines, stall_s=config.stall_s, adapts=config.concurrency == "adaptive" and config.engine == "vllm")  # the other tells nothing to adapt to
        self.actor: Actor | None = None
        self._security = resolve(config.security, address=config.address)
        self.endpoint = endpoint_of(config, self.replica, self._tokens)
        self.episodes = episodes_of(config, self._tokens, self.endpoint)
        self.mirror = Mirror(Path(config.mirror_dir) / f"{PREFIX}{self._replica_id}-{self._incarnation}")
        servicer = RolloutServicer(
            self.replica, self._tokens, mirror=self.mirror, replica_id=self._replica_id, model=config.model, learner=config.learner,
            refused=lambda: self.server.guard.num_refused,
        )  # fmt: skip
        self.server = rpc.Server(config.address, [lambda s: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, s)], self._security)
        self._gpus = Gpus()
        self.exporter = Exporter(
            config.metrics_address, FIGURES, Seen(replica=self.replica, num_refused=lambda: self.server.guard.num_refused, gpus=self._gpus, sessions=self._sessions),
            resolve(config.security, address=config.metrics_address),
        )  # fmt: skip

    def _sessions(self) -> dict[tuple[str, str], int]:
        return self.episodes.tally() if self.episodes is not None else {}

    @property
    def address(self) -> str:
        """host:port once it is bound."""
        return f"{self._config.address.rsplit(':', 1)[0]}:{self.server.port}"

    def stop(self) -> None:
        """Orderly: what runs is finished within GRACE_S, the learner gets a goodbye."""
        self._stopping.set()

    async def serve(self) -> None:
        """Raises ValueError for the user's mistakes (a model that cannot be served, a port in use, a learner's refusal)."""
        await self.server.start()
        if self._address_file is not None:
            _write_atomically(self._address_file, self.address)
        for name in sweep(Path(self._config.mirror_dir)):
            logger.info("removed %s, which a replica that is gone left behind", name)
        try:
            await self.exporter.start()
            if self.endpoint is not None:
                await self.endpoint.start()
            if self.episodes is not None:
                await self._until_stopped(self.episodes.check())
            await self._until_stopped(self.replica.start())
            if self._stopping.is_set():
                return
            logger.info("serves %s by %s at %s", self._config.model, self.replica.engine.info.name, self.address)
            await self._run()
        finally:
            await self.exporter.stop()
            await self.server.stop(grace_s=1.0)
            if self.episodes is not None:
                await self.episodes.stop()
            if self.endpoint is not None:
                await self.endpoint.stop()
            await self.replica.engine.stop()
            self.mirror.remove()

    async def _until_stopped(self, work: Awaitable[None]) -> None:
        """Runs `work` to its end or until stop(); raises what it raises."""
        task, stop = asyncio.ensure_future(work), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            stop.cancel()
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def _run(self) -> None:
        background = [asyncio.create_task(self.replica.supervise()), asyncio.create_task(self._health())]
        if self._config.weights_folder and not self._config.learner:
            background.append(asyncio.create_task(self._follow_folder()))
        try:
            if self._config.learner:
                await self._take_part()
            else:
                await self._stopping.wait()
                await self.replica.drain(GRACE_S)
        finally:
            for task in background:
                task.cancel()

    async def _health(self) -> None:
        """Health checks say SERVING once a current version is loaded, those of the service "live" while the engine is up."""
        while True:
            await self.server.ready(self.replica.ready)
            await self.server.ready(self.replica.state != rollout_pb2.REPLICA_STATE_STARTING, service=LIVE)
            await asyncio.sleep(CHECK_S)

    # --- a learner's run

    async def _take_part(self) -> None:
        """Attends run after run, or one only with exit_when_finished."""
        while not self._stopping.is_set():
            try:
                await self._attend_one()
            except Left as left:
                logger.info("%s", left)
                if self._config.exit_when_finished or not left.finished:
                    return
                await self._until_stopped(self._until_another_run())
                if not self._stopping.is_set():
                    await self.replica.restart("another run starts from the base weights", keeps=False)

    def _source(self, stub: Any) -> Source:
        """Where versions come from that no push brings."""
        if self._config.weights_folder:
            return FolderSource(self.mirror, Place(self._config.weights_folder))

        def fetch(request: learner_pb2.FetchWeightsRequest) -> Any:
            return stub.FetchWeights(request, timeout=rpc.deadline_s("FetchWeights"))

        return LearnerSource(self.mirror, fetch, peers=self._config.peers, deltas=self._config.deltas, security=self._security)

    async def _follow_folder(self) -> None:
        """Without a learner: serves the newest version on the shared path, for ever."""
        source = FolderSource(self.mirror, Place(self._config.weights_folder))
        while True:
            await self._follow_one_life(source)
            await asyncio.sleep(CHECK_S)

    async def _follow_one_life(self, source: FolderSource) -> None:
        """Until the engine comes up anew: it has the base weights then, which a driver of the life before would not know."""
        life = self.replica.life
        driver = self.replica.driver = UpdateDriver(self.replica.engine, source=source, committed=self.replica.tally.updated)
        driver.welcome(0)
        running = asyncio.create_task(driver.run())
        try:
            while self.replica.life == life:
                versions = await asyncio.to_thread(source.place.versions)
                if versions and versions[-1] > driver.newest_version:
                    driver.order(learner_pb2.AttendResponse(published=learner_pb2.Published(version=versions[-1])))
                await asyncio.sleep(_ASK_AGAIN_S)
        finally:
            running.cancel()

    async def _until_another_run(self) -> None:
        """Goes on serving the last weights of a finished run; returns once a learner with a run to do answers."""
        async with rpc.channel(self._config.learner, self._security) as channel:
            stub = learner_pb2_grpc.LearnerServiceStub(channel)
            while True:
                with suppress(grpc.aio.AioRpcError):
                    status = await stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=rpc.deadline_s("GetStatus"))
                    if not status.finished:
                        return
                await asyncio.sleep(_ASK_AGAIN_S)

    async def _attend_one(self) -> None:
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(rpc.channel(self._config.learner, self._security))
            stub = learner_pb2_grpc.LearnerServiceStub(channel)
            scoring = Scoring(self._config.rewards, timeout_s=self._config.score_timeout_s, security=self._security)
            grouped = GroupScoring(self._config.rewards, timeout_s=self._config.score_timeout_s, security=self._security) if self._config.score_groups else None
            if grouped is not None:
                stack.push_async_callback(grouped.close)
            submitting, reporting = Submitting(channel), Reporting(stub, self.replica.engine.drawn)

            def welcomed(welcome: learner_pb2.Welcome) -> None:
                scoring.scorer = welcome.scorer

            membership = Membership(
                source=self._source(stub), keep_mirror=self._config.peers, stub=stub, address=self._config.learner, replica=self.replica, hello=self._hello, welcomed=welcomed, drain=self._drain,
                gpus=self._gpus.now,
            )  # fmt: skip
            self.actor = Actor(
                stub=stub, replica=self.replica, tokens=self._tokens, scoring=scoring, submitting=submitting, reporting=reporting, who=membership.who, group_scoring=grouped, episodes=self.episodes
            )  # fmt: skip
            attending = asyncio.create_task(membership.attend())
            acting = asyncio.create_task(self.actor.run())
            carriers = [asyncio.create_task(scoring.run()), asyncio.create_task(submitting.run()), asyncio.create_task(reporting.run())]
            stop = asyncio.create_task(self._stopping.wait())
            try:
                done, _ = await asyncio.wait([attending, acting, *carriers, stop], return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stop}:
                    task.result()
                await self._goodbye(membership, attending)
            finally:
                await _cancel([attending, acting, *carriers, stop])

    async def _goodbye(self, membership: Membership, attending: asyncio.Task[None]) -> None:
        """Finishes what is in hand, then leaves; leases not finished are free at once."""
        await self._drain(GRACE_S)
        membership.leave()
        with suppress(TimeoutError, Left):
            await asyncio.wait_for(attending, 5.0)

    async def _drain(self, grace_s: float) -> None:
        """Takes nothing new, and gives groups in hand grace_s to be drawn, scored and received."""
        assert self.actor is not None
        self.replica.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self.actor.finish(), grace_s)
        await self.replica.drain(0.0)
        with suppress(TimeoutError):  # what was aborted is handed back, so that another replica draws on from there
            await asyncio.wait_for(self.actor.finish(), HAND_BACK_S)

    def _hello(self) -> learner_pb2.Hello:
        info = self.replica.engine.info
        return learner_pb2.Hello(
            replica_id=self._replica_id, incarnation=self._incarnation, run_id=self._config.run_id, contract=identity.CONTRACT,
            base_weights_digest=identity.weights_digest(self._folder), tokenizer_digest=identity.tokenizer_digest(self._folder),
            template_digest=identity.template_digest(self._folder), address=self.address, transports=self._transports(),
            served_dtype=self._config.dtype, max_model_len=info.max_model_len, engine=info.name, device_uuid=info.device_uuid,
            serves_weights=self._config.peers, num_workers=self._config.num_workers, worker_device_uuids=info.worker_device_uuids, visible_device_uuids=info.visible_device_uuids,
        )  # fmt: skip

    def _transports(self) -> list[learner_pb2.Transport]:
        """Best first."""
        if self._config.weights_folder:
            return [learner_pb2.TRANSPORT_FOLDER]
        device = [learner_pb2.TRANSPORT_IPC, learner_pb2.TRANSPORT_NCCL] if self.replica.engine.info.device_uuid else []
        return [*device, learner_pb2.TRANSPORT_GLOO, learner_pb2.TRANSPORT_GRPC]


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _write_atomically(path: Path, text: str) -> None:
    """Readers see the whole text or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)
