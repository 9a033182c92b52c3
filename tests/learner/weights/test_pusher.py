"""The push thread alone, against a gateway that answers as each test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
import torch
from torch import nn

from learner.weights.push import Pusher, store_host
from learner.weights.snapshot import Snapshot, SnapshotWriter
from protos import rpc
from protos.learner.v1alpha1 import feed_pb2, feed_pb2_grpc, learner_pb2


@dataclass
class Feed(feed_pb2_grpc.FeedServiceServicer):
    """Records BeginUpdate calls; `open` lets them through."""

    begins: list[tuple[int, int, int]] = field(default_factory=list)  # version, attempt, store port
    tokens: list[str] = field(default_factory=list)
    ends: list[feed_pb2.EndUpdateRequest] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    answer: Callable[[feed_pb2.BeginUpdateRequest], feed_pb2.BeginUpdateResponse] = lambda _: feed_pb2.BeginUpdateResponse()
    num_retries: int = 0
    outcomes: list[feed_pb2.MemberOutcome] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)  # seconds that each BeginUpdate had left when it came

    def BeginUpdate(self, request: feed_pb2.BeginUpdateRequest, context: grpc.ServicerContext) -> feed_pb2.BeginUpdateResponse:
        self.begins.append((request.version, request.attempt, request.store_port))
        self.limits.append(context.time_remaining())
        self.tokens.append(str(dict(context.invocation_metadata()).get("authorization", "")))
        self.gate.wait(20)
        return self.answer(request)

    def EndUpdate(self, request: feed_pb2.EndUpdateRequest, context: grpc.ServicerContext) -> feed_pb2.EndUpdateResponse:
        self.ends.append(request)
        return feed_pb2.EndUpdateResponse(retry=len(self.ends) <= self.num_retries, outcomes=self.outcomes)


@pytest.fixture
def feed() -> Iterator[tuple[Feed, str]]:
    servicer, server = Feed(), grpc.server(ThreadPoolExecutor(4))
    feed_pb2_grpc.add_FeedServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    servicer.gate.set()
    server.stop(0)


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    model = nn.Linear(4, 4, bias=False)
    return SnapshotWriter(model, root=tmp_path, incarnation=1, served_dtype="float32", bucket_bytes=1024).write(0)


def pusher(address: str, **options: object) -> Pusher:
    fixed = {"incarnation": 1, "rank": 0, "world_size": 1, "device": torch.device("cpu"), "store_host": "127.0.0.1"}
    return Pusher(address=address, **{**fixed, **options})  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def alone(_: feed_pb2.BeginUpdateRequest) -> feed_pb2.BeginUpdateResponse:
    """An epoch whose member never comes."""
    spec = learner_pb2.GroupSpec(transport=learner_pb2.TRANSPORT_GLOO, store_host="127.0.0.1", store_port=_.store_port, group_key=f"{_.attempt}", num_owners=1, num_receivers=1, collective_timeout_s=0.5)
    return feed_pb2.BeginUpdateResponse(epoch=3, members=["replica-a"], group=spec)


def test_versions_that_pile_up_during_a_push_are_skipped_for_the_newest(feed: tuple[Feed, str], snapshot: Snapshot) -> None:
    servicer, address = feed
    pushing = pusher(address)
    pushing.submit(1, snapshot)
    until(lambda: len(servicer.begins) == 1)
    for version in (2, 3, 4):
        pushing.submit(version, snapshot)
    assert not pushing.wait_idle(0.1)
    servicer.gate.set()
    assert pushing.wait_idle(40)
    assert [version for version, _, _ in servicer.begins] == [1, 4]
    assert pushing.metrics().num_skipped == 2
    assert pushing.close(5)


def test_rank_0_says_where_its_store_listens_and_others_do_not(feed: tuple[Feed, str], snapshot: Snapshot) -> None:
    servicer, address = feed
    servicer.gate.set()
    for rank in (0, 1):
        pushing = pusher(address, rank=rank)
        pushing.submit(1, snapshot)
        assert pushing.wait_idle(40) and pushing.close(5)
    assert servicer.begins[0][2] > 0 and servicer.begins[1][2] == 0


def test_a_member_that_never_comes_is_an_outcome_and_each_retry_is_a_new_attempt(feed: tuple[Feed, str], snapshot: Snapshot) -> None:
    servicer, address = feed
    servicer.answer, servicer.num_retries = alone, 2
    servicer.gate.set()
    pushing = pusher(address)
    pushing.submit(7, snapshot)
    assert pushing.wait_idle(20)
    assert [attempt for _, attempt, _ in servicer.begins] == [0, 1, 2]
    assert all(not end.ok and "receiver 1 did not appear in time" in end.error and end.epoch == 3 for end in servicer.ends)
    numbers = pushing.metrics()
    assert (numbers.num_failed, numbers.num_pushed, numbers.bytes_rooted, numbers.last_version) == (3, 0, 0, 7)
    assert pushing.close(5)


def test_what_a_replica_says_of_its_failure_reaches_the_trainer_in_time(feed: tuple[Feed, str], snapshot: Snapshot) -> None:  # faults.md 19
    servicer, address = feed
    servicer.answer = alone
    servicer.outcomes = [feed_pb2.MemberOutcome(replica_id="replica-a", phase=learner_pb2.UPDATE_PHASE_FAILED, detail="staging of 48 bytes does not fit on cuda:0")]
    servicer.gate.set()
    pushing, began = pusher(address, rank=1), time.monotonic()
    pushing.submit(7, replace(snapshot, rank=1))  # it is no root of this plan: its own sending cannot fail
    assert pushing.wait_idle(20) and time.monotonic() - began < 10
    numbers = pushing.metrics()
    assert numbers.last_error == "replica replica-a: staging of 48 bytes does not fit on cuda:0" and numbers.outcomes == {"failed": 1}
    assert pushing.close(5)


def test_a_push_that_fails_leaves_the_next_version_to_be_pushed(feed: tuple[Feed, str], snapshot: Snapshot) -> None:
    servicer, address = feed

    def refuse(request: feed_pb2.BeginUpdateRequest) -> feed_pb2.BeginUpdateResponse:
        if request.version == 1:
            raise RuntimeError("the gateway stumbled")
        return feed_pb2.BeginUpdateResponse()

    servicer.answer = refuse
    servicer.gate.set()
    pushing = pusher(address)
    pushing.submit(1, snapshot)
    assert pushing.wait_idle(40) and "UNKNOWN" in pushing.metrics().last_error
    pushing.submit(2, snapshot)
    assert pushing.wait_idle(40)
    assert [version for version, _, _ in servicer.begins] == [1, 2] and pushing.metrics().num_failed == 1
    assert pushing.close(5)


@pytest.mark.parametrize("reachable", [True, False])
def test_close_ends_a_blocked_call_in_time(feed: tuple[Feed, str], snapshot: Snapshot, reachable: bool) -> None:
    servicer, address = feed
    pushing = pusher(address if reachable else "127.0.0.1:1")
    pushing.submit(1, snapshot)
    if reachable:
        until(lambda: len(servicer.begins) == 1)
    began = time.monotonic()
    assert pushing.close(20)
    assert time.monotonic() - began < 10


def test_close_gives_up_a_transfer_that_waits_for_a_receiver(feed: tuple[Feed, str], snapshot: Snapshot) -> None:
    servicer, address = feed

    def waiting(request: feed_pb2.BeginUpdateRequest) -> feed_pb2.BeginUpdateResponse:
        response = alone(request)
        response.group.collective_timeout_s = 60.0
        return response

    servicer.answer = waiting
    servicer.gate.set()
    pushing = pusher(address)
    pushing.submit(1, snapshot)
    until(lambda: len(servicer.begins) == 1)
    time.sleep(0.2)
    began = time.monotonic()
    assert pushing.close(20)
    assert time.monotonic() - began < 15  # the transfer would wait for a minute


def test_the_token_travels_with_every_call(feed: tuple[Feed, str], snapshot: Snapshot) -> None:
    servicer, address = feed
    servicer.gate.set()
    pushing = pusher(address, security=rpc.Security(token="s3cret"))
    pushing.submit(1, snapshot)
    assert pushing.wait_idle(40) and pushing.close(5)
    assert servicer.tokens == ["Bearer s3cret"]


def test_a_queued_version_can_be_sent_after_its_folder_was_removed(feed: tuple[Feed, str], snapshot: Snapshot) -> None:
    from learner.weights.sender import OpenSnapshot

    before = (snapshot.folder / "rank-0.bin").read_bytes()
    opened = OpenSnapshot(snapshot)
    for path in snapshot.folder.iterdir():
        path.unlink()
    assert bytes(opened.bucket(0).tolist()) == before


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1:7430", "127.0.0.1"), ("learner.example:1", "learner.example"), ("[::1]:9", "::1")])
def test_the_store_is_reached_by_the_gateways_host(address: str, host: str) -> None:
    assert store_host(address) == host


def test_a_wildcard_address_becomes_the_machines_own() -> None:
    assert store_host("0.0.0.0:7430") not in ("", "0.0.0.0")


def test_calls_wait_as_long_as_the_settings_let_the_gateway_take(feed: tuple[Feed, str], snapshot: Snapshot) -> None:
    servicer, address = feed
    servicer.gate.set()
    for options in ({}, {"deadline_s": 5000.0, "settle_s": 900.0}):
        pushing = pusher(address, **options)
        pushing.submit(1, snapshot)
        assert pushing.wait_idle(40)
        servicer.limits.append(pushing._end_limit_s)
        assert pushing.close(5)
    # The table's 120 and 1200 seconds at least; else settle_s + 60 and deadline_s + 60. What remained when the call came in is a little less, or rounded up.
    limits = servicer.limits
    assert 100 < limits[0] < 122 and limits[1] == 1200
    assert 940 < limits[2] < 962 and limits[3] == 5060
