"""Membership: one stream a replica, heartbeats up, orders down.

    task        consumes                   produces                     waits for          unblocked by
    attend      the session's outbox       orders on the stream         the next order     send, broadcast, end
    _read       the stream                 heartbeats, reports, ends    the next message   the replica, its death, cancel
    watch       the clock                  the end of silent sessions   half a heartbeat   time

A session ends once, for one reason; whatever ends it, its replica's leases are free at once (`lost`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import grpc

from learner.gateway.handshake import Claim, Identity, refusal, too_short
from learner.gateway.refusals import Refused, precondition, unavailable
from learner.gateway.replicas import GpuSeen, Load, Replica
from protos.learner.v1alpha1 import learner_pb2 as pb

logger = logging.getLogger("headrace.learner.attendance")

MAX_QUEUED_ORDERS = 64
_NEVER = "says that it has loaded"
Write = Callable[[pb.AttendResponse], Awaitable[None]]


class Session:
    """The orders of one stream, and how it ended."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.ended = False
        self.said_goodbye = False
        self.error: Refused | None = None
        self._orders: deque[pb.AttendResponse] = deque()
        self._changed = asyncio.Event()

    def put(self, order: pb.AttendResponse) -> None:
        """Queues an order; a replica that reads none of many is ended."""
        if len(self._orders) >= MAX_QUEUED_ORDERS:
            self.end(unavailable(f"replica {self.replica.claim.replica_id} left {MAX_QUEUED_ORDERS} orders unread; attend again"))
        if not self.ended:
            self._orders.append(order)
            self._changed.set()

    def end(self, error: Refused | None) -> None:
        """Ends the stream after the queued orders; the first reason stays."""
        if not self.ended:
            self.ended, self.error = True, error
            self._changed.set()

    async def get(self) -> pb.AttendResponse | None:
        """The next order; None once the session has ended and all orders are out."""
        while not self._orders and not self.ended:
            self._changed.clear()
            await self._changed.wait()
        return self._orders.popleft() if self._orders else None


class Attendance:
    """The replica table and its streams. `lost`, `reported` and `changed` are called on the event loop."""

    def __init__(self, identity: Identity, *, heartbeat_s: float, silence_s: float, scorer: str, newest_version: Callable[[], int], last_version: Callable[[], int], push_deadline_s: float = 0.0) -> None:
        """newest_version: what can be fetched now. last_version: the highest number that was ever published; nobody can have a higher one.
        push_deadline_s: of an epoch, for replicas to be as patient."""
        self.identity = identity
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._scorer = scorer
        self._newest_version, self._last_version, self._push_deadline_s = newest_version, last_version, push_deadline_s
        self._sessions: dict[str, Session] = {}
        self._alone_since_s: float | None = asyncio.get_running_loop().time()  # None: somebody attends
        self.replicas: dict[str, Replica] = {}  # known ones, attending or not, by replica_id
        self.lost: list[Callable[[str, int], None]] = []  # (replica_id, incarnation)
        self.reported: list[Callable[[Replica, pb.UpdateReport], None]] = []
        self.diagnosed: list[Callable[[Replica, pb.Diagnosis], None]] = []
        self.changed: list[Callable[[], None]] = []  # somebody may lease who might not before

    async def attend(self, requests: AsyncIterator[pb.AttendRequest], write: Write) -> None:
        """Serves one stream until it ends. Raises Refused with the reason when it did not end in good order."""
        try:
            async with asyncio.timeout(self._silence_s):
                claim = await _hello(requests)
        except TimeoutError:
            raise unavailable(f"the stream said nothing for {self._silence_s} s (silence_s); say Hello first") from None
        session = self._admit(claim)
        reader = asyncio.create_task(self._read(session, requests))
        try:
            await write(pb.AttendResponse(welcome=self._welcome()))
            while (order := await session.get()) is not None:
                await write(order)
        finally:
            reader.cancel()
            self._leave(session)
        if session.error is not None:
            raise session.error

    def find(self, replica_id: str, incarnation: int) -> Replica | None:
        """The attending replica in exactly this life, if it attends."""
        replica = self.replicas.get(replica_id)
        return replica if replica and replica.attending and replica.claim.incarnation == incarnation else None

    @property
    def alone_s(self) -> float:
        """For how long nobody has attended; 0 while somebody does."""
        return 0.0 if self._alone_since_s is None else asyncio.get_running_loop().time() - self._alone_since_s

    def attending(self) -> list[Replica]:
        """Attending replicas by replica_id."""
        return [replica for _, replica in sorted(self.replicas.items()) if replica.attending]

    def send(self, member: tuple[str, int], order: pb.AttendResponse) -> None:
        """Queues an order for a replica in exactly this life; one that left gets none."""
        session = self._sessions.get(member[0])
        if session is not None and session.replica.member == member:
            session.put(order)

    def broadcast(self, order: pb.AttendResponse) -> None:
        for session in list(self._sessions.values()):
            session.put(order)

    def need_tokens(self, needed_tokens: int) -> None:
        """The longest prompt is known now: replicas that are too short for it are refused, those that attend too."""
        self.identity = replace(self.identity, needed_tokens=needed_tokens)
        for session in list(self._sessions.values()):
            if message := too_short(session.replica.claim, needed_tokens):
                self._end(session, precondition(message))

    async def watch(self) -> None:
        """Ends sessions that were silent for silence_s, for ever."""
        loop = asyncio.get_running_loop()
        pause_s = min(self._heartbeat_s, self._silence_s) / 2
        before_s = loop.time()
        while True:
            await asyncio.sleep(pause_s)
            asleep_s, before_s = loop.time() - before_s - pause_s, loop.time()
            for session in list(self._sessions.values()):
                session.replica.heard_s += max(0.0, asleep_s)  # we were not there to listen
                silent_s = loop.time() - session.replica.heard_s
                if silent_s > self._silence_s:
                    session.replica.detail = f"was silent for {silent_s:.1f} s"
                    self._end(session, unavailable(f"replica {session.replica.claim.replica_id} was silent for {silent_s:.1f} s, more than silence_s={self._silence_s}; attend again"))

    def end_all(self, error: Refused | None) -> None:
        for session in list(self._sessions.values()):
            self._end(session, error)

    def _admit(self, claim: Claim) -> Session:
        """Raises Refused: FAILED_PRECONDITION for a stranger, ALREADY_EXISTS for an older life."""
        if message := refusal(claim, self.identity):
            logger.warning("refused: %s", message)
            raise precondition(message)
        known = self.replicas.get(claim.replica_id)
        if known is not None and known.attending and known.claim.incarnation > claim.incarnation:  # else: its clock was set back between two lives
            raise _superseded(claim.replica_id, claim.incarnation, known.claim.incarnation)
        older = self._sessions.get(claim.replica_id)
        if older is not None and older.replica.claim.incarnation == claim.incarnation:
            self._end(older, unavailable(f"replica {claim.replica_id} attends on a newer stream"))
        elif older is not None:
            self._end(older, _superseded(claim.replica_id, older.replica.claim.incarnation, claim.incarnation))
        now_s = asyncio.get_running_loop().time()
        if known is not None and known.claim.incarnation == claim.incarnation:
            replica = known
            replica.claim, replica.heard_s, replica.attending, replica.lost, replica.moved_s = claim, now_s, True, False, now_s
        else:
            replica = Replica(claim=claim, heard_s=now_s, attending=True, moved_s=now_s)
        session = Session(replica)
        self.replicas[claim.replica_id] = replica
        self._sessions[claim.replica_id] = session
        self._alone_since_s = None
        logger.info("replica %s attends (incarnation %d, %s)", claim.replica_id, claim.incarnation, claim.address)
        return session

    async def _read(self, session: Session, requests: AsyncIterator[pb.AttendRequest]) -> None:
        try:
            async for request in requests:
                if session.ended:
                    return
                session.replica.heard_s = asyncio.get_running_loop().time()
                if self._take(session, request):
                    break
        except grpc.RpcError as error:
            logger.info("stream of replica %s broke: %s", session.replica.claim.replica_id, error)
        self._end(session, None)

    def _take(self, session: Session, request: pb.AttendRequest) -> bool:
        """Handles one message; True for a goodbye."""
        replica, kind = session.replica, request.WhichOneof("message")
        if kind == "heartbeat":
            beat = request.heartbeat
            could = replica.may_lease
            replica.heartbeat(
                state=beat.state, loaded_version=self._believed(replica, beat.loaded_version), num_running=beat.num_running,
                num_free=beat.num_free, num_tokens=beat.num_tokens, idle_s=beat.idle_s,
            )  # fmt: skip
            replica.loaded_with(_load(beat), asyncio.get_running_loop().time())
            if replica.may_lease and not could:
                _call(self.changed)
        elif kind == "update_report":
            self._report(replica, request.update_report)
        elif kind == "diagnosis":
            for listener in self.diagnosed:
                listener(replica, request.diagnosis)
        elif kind == "goodbye":
            session.said_goodbye = True
        return bool(kind == "goodbye")

    def _believed(self, replica: Replica, version: int) -> int:
        """The version that a replica says it has; 0, as of none, for one that was never published: it is pushed to and lent nothing."""
        last = self._last_version()
        if version <= last:
            return version
        if not replica.detail.startswith(_NEVER):
            replica.detail = f"{_NEVER} version {version}, the newest published is {last}: counted as none"
            logger.warning("replica %s %s", replica.claim.replica_id, replica.detail)
        return 0

    def _report(self, replica: Replica, report: pb.UpdateReport) -> None:
        if report.state:
            replica.state = report.state
        if self._believed(replica, report.version) != report.version:
            return  # of no version of this run
        if report.phase == pb.UPDATE_PHASE_LOADED:
            replica.loaded_version = max(replica.loaded_version, report.version)
            _call(self.changed)
        if report.phase == pb.UPDATE_PHASE_FAILED:
            replica.detail = report.detail
            logger.warning("replica %s failed version %d: %s", replica.claim.replica_id, report.version, report.detail)
        for listener in self.reported:
            listener(replica, report)

    def _end(self, session: Session, error: Refused | None) -> None:
        session.end(error)
        self._leave(session)

    def _leave(self, session: Session) -> None:
        """Frees what the stream held; a stream that was replaced frees nothing of its successor."""
        session.end(None)
        replica = session.replica
        if self._sessions.get(replica.claim.replica_id) is not session:
            return
        del self._sessions[replica.claim.replica_id]
        replica.left_in_order = session.said_goodbye
        replica.attending, replica.lost = False, not session.said_goodbye and (session.error is None or session.error.code is grpc.StatusCode.UNAVAILABLE)
        if not self._sessions:
            self._alone_since_s = asyncio.get_running_loop().time()
        logger.info("replica %s left: %s", replica.claim.replica_id, session.error or "its stream ended")
        for listener in self.lost:
            listener(*replica.member)

    def _welcome(self) -> pb.Welcome:
        return pb.Welcome(
            run_id=self.identity.run_id,
            newest_version=self._newest_version(),
            heartbeat_s=self._heartbeat_s,
            silence_s=self._silence_s,
            scorer=self._scorer,
            push_deadline_s=self._push_deadline_s,
        )


def _load(beat: pb.Heartbeat) -> Load:
    gpus = tuple(GpuSeen(index=gpu.index, uuid=gpu.uuid, use=gpu.use, used_bytes=gpu.used_bytes, size_bytes=gpu.size_bytes, power_w=gpu.power_w) for gpu in beat.gpus)
    return Load(num_scoring=beat.num_scoring, drawing_s=beat.drawing_s, scoring_s=beat.scoring_s, num_scored=beat.num_scored, num_unscored=beat.num_unscored, num_drawn=beat.num_drawn, gpus=gpus)


async def _hello(requests: AsyncIterator[pb.AttendRequest]) -> Claim:
    """The first message. Raises Refused when it is something else or the stream ends."""
    async for request in requests:
        if request.WhichOneof("message") != "hello":
            break
        hello = request.hello
        return Claim(
            replica_id=hello.replica_id, incarnation=hello.incarnation, run_id=hello.run_id, contract=hello.contract,
            base_weights_digest=hello.base_weights_digest, tokenizer_digest=hello.tokenizer_digest,
            template_digest=hello.template_digest, served_dtype=hello.served_dtype, max_model_len=hello.max_model_len,
            address=hello.address, transports=tuple(hello.transports), device_uuid=hello.device_uuid,
            num_workers=max(1, hello.num_workers), worker_devices=tuple(hello.worker_device_uuids), visible_devices=tuple(hello.visible_device_uuids),
            serves_weights=hello.serves_weights,
        )  # fmt: skip
    raise precondition("the first message of Attend was no Hello; say who you are first")


def _superseded(replica_id: str, older: int, newer: int) -> Refused:
    return Refused(
        grpc.StatusCode.ALREADY_EXISTS,
        f"replica_id {replica_id} belongs to incarnation {newer} now, this is {older}; leave, or start again under another replica_id",
    )


def _call(listeners: list[Callable[[], None]]) -> None:
    for listener in listeners:
        listener()
