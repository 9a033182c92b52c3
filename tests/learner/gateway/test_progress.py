"""Unfinished samples outlive their replica: reports are journaled, fenced by the lease, and lent again with the group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash

from learner.gateway.groups import SampleFacts
from learner.gateway.ledger import Ledger
from learner.gateway.parts import Part
from learner.gateway.terms import Limits
from protos.arrays import pack_floats, pack_ids, unpack
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.learner.gateway.gateway_harness import Actor, Child, Trainer, config_in, eventually, sample
from tests.learner.gateway.scenes import begun
from tests.learner.gateway.test_parts import part

LIMITS = Limits(groups_per_step=1, group_size=2, max_staleness=1)


def lent(ledger: Ledger) -> str:
    """Publishes version 1 and lends g00000000 under lease l1."""
    ledger.publish(0)
    return ledger.open_group(holder="a", lease_id="l1", now=0.0, lapse_at=100.0, prompt_id="p", prompt_row=0)[0].group_id


def report(ledger: Ledger, more: Part, *, lease_id: str = "l1", index: int = 0, before: bytes | None = None) -> tuple[str, int]:
    known = ledger.account.groups[0].parts.get(index)
    ids = (known.ids if known else b"") if before is None else before
    answer = ledger.report("g00000000", index, lease_id=lease_id, part=more, digest_before=xxhash.xxh3_64_intdigest(ids))
    return answer.status, answer.num_tokens


def test_each_report_is_taken_once_from_the_present_holder_alone() -> None:
    ledger = Ledger(LIMITS)
    lent(ledger)
    first, second = part(0, [1, 2], [(1, 2)]), part(2, [3], [(1, 3)])
    assert report(ledger, first) == ("accepted", 2)
    assert report(ledger, first) == ("elsewhere", 2)  # sent again: nothing is added twice
    assert report(ledger, second, lease_id="l0") == ("foreign", 2)
    assert report(ledger, second, before=part(0, [2, 1], [(1, 2)]).ids) == ("foreign", 2)  # as many tokens, but others
    assert report(ledger, second) == ("accepted", 3)
    assert report(ledger, part(3, [], [(1, 3)], "stop")) == ("accepted", 3)
    assert report(ledger, part(3, [9], [(1, 4)])) == ("foreign", 3)  # nothing follows a finished sample
    assert ledger.account.groups[0].parts[0] == part(0, [1, 2, 3], [(1, 3)], "stop")


def test_reports_of_versions_that_the_lease_did_not_allow_are_refused() -> None:
    ledger = Ledger(LIMITS)
    lent(ledger)
    with pytest.raises(ValueError, match="names version 2"):
        report(ledger, part(0, [1], [(2, 1)]))
    with pytest.raises(ValueError, match="outside the group"):
        report(ledger, part(0, [1], [(1, 1)]), index=2)


def facts(version: int = 1) -> SampleFacts:
    return SampleFacts(reward=1.0, num_prompt_tokens=1, num_completion_tokens=3, num_trained_tokens=3, spans=((version, 3),))


def test_a_submitted_sample_needs_its_part_no_more() -> None:
    ledger = Ledger(LIMITS)
    name = lent(ledger)
    report(ledger, part(0, [1, 2], [(1, 2)]))
    assert ledger.progress_bytes == 16
    ledger.submit(name, 0, facts())
    assert ledger.progress_bytes == 0
    assert report(ledger, part(2, [3], [(1, 3)])) == ("unwanted", 0)


def test_what_is_kept_of_unfinished_samples_is_bounded() -> None:
    ledger = Ledger(Limits(groups_per_step=1, group_size=2, max_staleness=1, max_progress_bytes=24))  # three tokens of 8 bytes
    lent(ledger)
    assert report(ledger, part(0, [1, 2], [(1, 2)])) == ("accepted", 2)
    assert report(ledger, part(0, [1, 2], [(1, 2)]), index=1) == ("full", 0)
    assert report(ledger, part(0, [1], [(1, 1)]), index=1) == ("accepted", 1)


def test_parts_live_through_a_cut_and_through_a_replay_of_the_records() -> None:
    ledger, records = Ledger(LIMITS), []
    made = ledger._made

    def kept(**record: Any) -> dict[str, Any]:
        records.append(record)
        return made(**record)

    ledger._made = kept  # type: ignore[method-assign]
    lent(ledger)
    report(ledger, part(0, [1, 2], [(1, 2)]))
    report(ledger, part(2, [3], [(1, 3)]))
    again = Ledger(LIMITS)
    for record in records:
        again.apply(record)
    assert again.state() == ledger.state() == Ledger.from_state(LIMITS, ledger.state()).state()
    assert again.account.groups[0].parts[0] == part(0, [1, 2, 3], [(1, 3)])


# Over gRPC


async def told(actor: Actor, lease: pb.Lease, ids: list[int], *, start: int = 0, before: list[int] | None = None, index: int = 0, version: int = 1, finish: Any = 0, run_id: str = "r1") -> pb.ReportProgressResponse:
    """The answer to one report of tokens that version `version` drew."""
    end = start + len(ids)
    spans = [trajectory_pb2.VersionSpan(version=version, start=0, end=end)]
    message = pb.PartialSample(sample_index=index, start=start, token_ids=pack_ids(ids), logprobs=pack_floats([-0.5] * len(ids)), spans=spans, finish_reason=finish)
    call = actor.stub.ReportProgress(timeout=20)
    await call.write(pb.ReportProgressRequest(run_id=run_id, lease_id=lease.lease_id, group_id=lease.group_id, part=message, digest_before=xxhash.xxh3_64_intdigest(pack_ids(before or []).data)))
    await call.done_writing()
    [answer] = [answer async for answer in call]
    return answer


def parts_of(lease: pb.Lease) -> dict[int, tuple[list[int], int]]:
    """Ids and finish reason by sample index."""
    return {part.sample_index: ([int(token) for token in unpack(part.token_ids)], part.finish_reason) for part in lease.parts}


async def test_another_replica_is_lent_what_a_dead_one_had_drawn(tmp_path: Path) -> None:
    config = config_in(tmp_path, lease={"heartbeat_s": 0.1, "silence_s": 1.0, "report_every_tokens": 2})
    async with begun(config, tmp_path) as at:
        [lease] = await at.actor.lease()
        assert lease.report_every_tokens == 2 and not lease.parts
        assert (await told(at.actor, lease, [5, 6])).status == pb.PROGRESS_STATUS_ACCEPTED
        assert (await told(at.actor, lease, [7], start=2, before=[5, 6])).num_tokens == 3
        assert (await told(at.actor, lease, [8, 1], index=1, finish=trajectory_pb2.FINISH_REASON_STOP)).status == pb.PROGRESS_STATUS_ACCEPTED
        at.actor.call.cancel()  # it is gone
        other = Actor(at.address, config, "b")
        await other.attend()
        [again] = await other.lease()
        assert (again.group_id, again.attempt, list(again.done)) == (lease.group_id, 2, [])
        assert parts_of(again) == {0: ([5, 6, 7], 0), 1: ([8, 1], trajectory_pb2.FINISH_REASON_STOP)}
        assert [(span.version, span.start, span.end) for span in again.parts[0].spans] == [(1, 0, 3)]
        assert (await told(at.actor, lease, [9], start=3, before=[5, 6, 7])).status == pb.PROGRESS_STATUS_FOREIGN  # late words of the dead one
        assert (await told(other, again, [9], start=3, before=[5, 6, 7])).status == pb.PROGRESS_STATUS_ACCEPTED
        status = await other.stub.GetStatus(pb.GetStatusRequest(), timeout=30)
        assert (status.num_progress_reports, status.num_continued_samples, status.num_continued_tokens) == (4, 2, 5)
        await other.fulfil(again)
        assert (await told(other, again, [9], start=4, before=[5, 6, 7, 9])).status == pb.PROGRESS_STATUS_UNWANTED
        await other.leave()


async def test_a_replica_that_says_goodbye_has_not_failed_at_its_groups(tmp_path: Path) -> None:
    async with begun(config_in(tmp_path), tmp_path) as at:
        [lease] = await at.actor.lease()
        await told(at.actor, lease, [5, 6])
        await at.actor.write(pb.AttendRequest(goodbye=pb.Goodbye()))
        other = Actor(at.address, at.actor.config, "b")
        await other.attend()
        [again] = await other.lease()
        assert (again.group_id, again.attempt) == (lease.group_id, 1)
        assert parts_of(again) == {0: ([5, 6], 0)}
        await other.leave()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run_id": "r2"}, "belongs to run r2"),
        ({"ids": [5, 99]}, r"must lie in \[0, 32\)"),
        ({"ids": []}, "must at least say"),
        ({"version": 9}, "names version 9"),
        ({"finish": trajectory_pb2.FINISH_REASON_ABORT}, "finish_reason 3"),
    ],
)
async def test_a_malformed_report_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    async with begun(config_in(tmp_path), tmp_path) as at:
        [lease] = await at.actor.lease()
        with pytest.raises(grpc.aio.AioRpcError, match=words) as found:
            await told(at.actor, lease, **{"ids": [5, 6], **change})
        assert found.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "progress of sample (g00000000, 0)" in str(found.value.details())


async def test_reports_outlive_the_gateway_and_the_segments_that_a_cut_made_superfluous(tmp_path: Path) -> None:
    config = config_in(tmp_path, journal={"segment_bytes": 4096})
    child = Child(config)
    address = await child.start()
    actor, trainer = Actor(address, config), Trainer(address, tmp_path / "shm")
    await trainer.register()
    await trainer.close(0)
    await actor.attend()
    first, second, third = await actor.lease(max_groups=3)
    await told(actor, third, [5, 6, 7])
    for lease in (first, second):
        await actor.fulfil(lease)
    await trainer.take(0)
    await trainer.close(1, will_save=True)
    await trainer.save(1, config.run_dir)
    await told(actor, third, [8], start=3, before=[5, 6, 7])  # after the cut
    assert child.process is not None
    child.process.kill()
    await child.killed()
    await actor.leave()
    address = await child.start()
    again = Actor(address, config, "b")
    trainer = Trainer(address, tmp_path / "shm", incarnation=200)
    answer = await trainer.register()
    await trainer.close(answer.policy_step)
    await again.attend(loaded_version=3)
    found: list[pb.Lease] = []

    async def lent_again() -> bool:
        found.extend(await again.lease(max_groups=4, wait_s=0.5))
        return any(lease.group_id == third.group_id for lease in found)

    await eventually(lent_again)
    [lease] = [lease for lease in found if lease.group_id == third.group_id]
    assert parts_of(lease) == {0: ([5, 6, 7, 8], 0)}
    await again.submit(sample(lease, 0, 3, reward=0.0), sample(lease, 1, 3))
    await again.leave()
    await child.stop()
