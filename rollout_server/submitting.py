"""Submits finished samples until each has its receipt.

    submit    produces a sample, waits for room and then its receipt,      unblocked by the receipt
    _writer   consumes the order of samples, waits for the next,           unblocked by submit
    run       consumes receipts, waits for the learner,                    unblocked by a receipt or the stream's end

Receipts come in the order of submission. A stream that breaks is opened again, and whatever has no receipt is sent again
in the same order; the learner's account knows samples by identity, so twice does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from protos import faultpoints, rpc
from protos.fields import key as field_key
from protos.learner.v1alpha1 import learner_pb2 as pb

logger = logging.getLogger("headrace.rollout.submitting")

MAX_PENDING = 1024  # samples without receipt; beyond it submit blocks, and with it sampling
MESSAGE_BYTES = 256 << 10  # samples that are ready at the same time share a message up to about this size
_METHOD = f"/{pb.DESCRIPTOR.services_by_name['LearnerService'].full_name}/SubmitTrajectories"
_ONE, _SEVERAL = pb.SubmitTrajectoriesRequest.TRAJECTORY_FIELD_NUMBER, pb.SubmitTrajectoriesRequest.TRAJECTORIES_FIELD_NUMBER
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Finished:
    """A finished sample, encoded once. Example: Finished(run_id="r1", lease_id="l7", group_id="g00000003", sample_index=1, trajectory=b"...")"""

    run_id: str
    lease_id: str
    group_id: str
    sample_index: int
    trajectory: bytes  # a whole Trajectory of trajectory.proto (`protos.arrays.encoded`), with the same group_id and sample_index

    @property
    def key(self) -> tuple[str, int]:
        return self.group_id, self.sample_index


@dataclass(kw_only=True, slots=True, eq=False)
class _Entry:
    sample: Finished
    receipt: asyncio.Future[pb.SubmitTrajectoriesResponse]


class MalformedError(Exception):
    """The learner calls a submission malformed: a defect of this program, and sending it again would not help."""


class Submitting:
    """`channel`: to the learner. Messages leave encoded (see `together`), so the call is made here and not by the stub."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._submit_trajectories: Any = channel.stream_stream(_METHOD, response_deserializer=pb.SubmitTrajectoriesResponse.FromString)
        self._room = asyncio.Semaphore(MAX_PENDING)
        self._unsent: asyncio.Queue[_Entry] = asyncio.Queue()
        self._sent: dict[tuple[str, int], _Entry] = {}  # in order of sending

    @property
    def num_pending(self) -> int:
        return len(self._sent) + self._unsent.qsize()

    async def submit(self, sample: Finished) -> pb.SubmitTrajectoriesResponse:
        """Returns the receipt, however long the learner is away."""
        async with self._room:
            faultpoints.point("before_submit")
            entry = _Entry(sample=sample, receipt=asyncio.get_running_loop().create_future())
            self._unsent.put_nowait(entry)
            return await entry.receipt

    async def run(self) -> None:
        """Until cancelled. Raises MalformedError."""
        wait_s = _FIRST_WAIT_S
        while True:
            await self._something_to_send()
            before = self.num_pending
            try:
                await self._stream()
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                    raise MalformedError(f"the learner refused a trajectory as malformed: {error.details()}") from None
                logger.info("submissions: %s %s; %d samples wait for their receipt", error.code().name, error.details(), self.num_pending)
            if self.num_pending < before:
                wait_s = _FIRST_WAIT_S
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _something_to_send(self) -> None:
        """No stream is held open for nothing."""
        while not self._sent and self._unsent.empty():
            entry = await self._unsent.get()
            self._sent[entry.sample.key] = entry

    async def _stream(self) -> None:
        call = self._submit_trajectories(timeout=rpc.deadline_s("SubmitTrajectories"))
        writer = asyncio.create_task(self._writer(call))
        try:
            async for answer in call:
                for receipt in answer.receipts or (answer,):
                    entry = self._sent.pop((receipt.group_id, receipt.sample_index), None)
                    if entry is not None and not entry.receipt.done():
                        entry.receipt.set_result(receipt)
        finally:
            writer.cancel()
            call.cancel()

    async def _writer(self, call: Any) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader sees why the stream ended
            await self._write(call, list(self._sent.values()))
            while True:
                await self._write(call, [await self._unsent.get(), *self._waiting()])

    def _waiting(self) -> Iterator[_Entry]:
        """What else waits to be sent."""
        while not self._unsent.empty():
            yield self._unsent.get_nowait()

    async def _write(self, call: Any, entries: list[_Entry]) -> None:
        """Sends entries in order, several to a message."""
        wanted = []
        for entry in entries:
            if entry.receipt.done():  # nobody waits any more
                self._sent.pop(entry.sample.key, None)
            else:
                self._sent[entry.sample.key] = entry
                wanted.append(entry.sample)
        for message in together(wanted):
            await call.write(message)


def together(samples: Sequence[Finished]) -> Iterator[bytes]:
    """The samples in order, in encoded SubmitTrajectoriesRequests of about MESSAGE_BYTES; one that stays alone names its lease."""
    last = len(samples) - 1
    start, num_bytes = 0, 0
    for index, sample in enumerate(samples):
        num_bytes += len(sample.trajectory)
        if num_bytes >= MESSAGE_BYTES or index == last or samples[index + 1].run_id != sample.run_id:
            yield _request(samples[start : index + 1])
            start, num_bytes = index + 1, 0


def _request(samples: Sequence[Finished]) -> bytes:
    """One message of samples of one run. Each trajectory is copied once."""
    first, alone = samples[0], len(samples) == 1
    number = _ONE if alone else _SEVERAL
    head = pb.SubmitTrajectoriesRequest(run_id=first.run_id, lease_id=first.lease_id if alone else "").SerializeToString()
    return b"".join((head, *(part for sample in samples for part in (field_key(number, len(sample.trajectory)), sample.trajectory))))
