"""Held-out prompts beside training, over loopback gRPC: own leases, own account, own lines; training is neither starved nor held up for ever."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.gateway import cuts
from protos.learner.v1alpha1 import feed_pb2, learner_pb2
from tests.learner.gateway.gateway_harness import Actor, Child, Trainer, config_in, eventually, running, sample

ACCEPTED, DUPLICATE, UNWANTED = learner_pb2.RECEIPT_STATUS_ACCEPTED, learner_pb2.RECEIPT_STATUS_DUPLICATE, learner_pb2.RECEIPT_STATUS_UNWANTED
EVALUATION = learner_pb2.LEASE_PURPOSE_EVALUATION


def evaluating(folder: Path, *, num_prompts: int = 3, evaluation: dict[str, Any] | None = None, **changes: Any) -> LearnerConfig:
    """A run with held-out prompts w10 ...; greedy answers only unless said otherwise."""
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"w{10 + n} w4", "answer": n}) + "\n" for n in range(num_prompts)))
    asked = {"prompts": held_out, "every_steps": 2, "at_start": False, "at_end": False, "deadline_s": 20.0, **(evaluation or {})}
    return config_in(folder, evaluation=asked, **changes)


def results(config: LearnerConfig) -> list[dict[str, Any]]:
    path = config.run_dir / "metrics.jsonl"
    return [line for line in map(json.loads, path.read_text().splitlines() if path.is_file() else []) if "evaluation" in line]


class Both(Actor):
    """An actor that sorts what it is lent by what it is for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lent: dict[bool, list[learner_pb2.Lease]] = {True: [], False: []}  # for evaluation or not; in hand, unanswered

    async def next(self, *, evaluation: bool) -> learner_pb2.Lease:
        async with asyncio.timeout(60):
            while not self.lent[evaluation]:
                for lease in await self.lease(wait_s=0.3):
                    self.lent[lease.purpose == EVALUATION].append(lease)
        return self.lent[evaluation].pop(0)


async def begun(address: str, folder: Path, config: LearnerConfig, steps: int = 0) -> tuple[Trainer, Both]:
    """Trainer and actor, `steps` steps of training later."""
    trainer, actor = Trainer(address, folder / "shm"), Both(address, config)
    await trainer.register()
    await trainer.close(0)
    await actor.attend()
    for step in range(steps):
        await train(trainer, actor, step)
    return trainer, actor


async def train(trainer: Trainer, actor: Both, step: int, *, will_save: bool = False) -> None:
    """One step; prompts of an evaluation that come between are left alone."""
    for _ in range(2):
        await actor.fulfil(await actor.next(evaluation=False), version=step + 1)
    await trainer.take(step)
    await trainer.close(step + 1, will_save=will_save)


async def held_out(actor: Both) -> learner_pb2.Lease:
    """The next prompt of an evaluation."""
    return await actor.next(evaluation=True)


async def the_end(trainer: Trainer, config: LearnerConfig, step: int) -> feed_pb2.BatchHeader:
    """Takes until the run is over; the cut of its last policy is made where it is asked for."""
    while True:
        header, _ = await trainer.take(step)
        if not header.save_first:
            return header
        await trainer.save(step, config.run_dir)


async def status(actor: Actor) -> learner_pb2.GetStatusResponse:
    answer = await actor.stub.GetStatus(learner_pb2.GetStatusRequest(), wait_for_ready=True, timeout=10)
    own = answer.evaluation
    assert own.num_leased == own.num_scored + own.num_unscored + own.num_lost + own.num_open
    assert answer.num_leased == answer.num_trained + sum(answer.num_dropped.values()) + answer.num_open
    return answer


async def test_an_evaluation_is_lent_scored_written_and_apart_from_the_training_account(tmp_path: Path) -> None:
    config = evaluating(tmp_path, evaluation={"samples": 2, "temperature": 0.7, "k": [1, 2], "max_new_tokens": 5})
    async with running(config) as gateway:
        _, actor = await begun(f"127.0.0.1:{gateway.port}", tmp_path, config, steps=2)
        before = await status(actor)
        leases = [await held_out(actor)]
        assert await actor.fulfil(leases[0], version=3, rewards=(1.0, 0.0, 1.0)) == [ACCEPTED] * 3
        leases += [await held_out(actor)]  # one prompt at a time: a quarter of no known places is still one prompt
        lease = leases[1]
        assert (lease.prompt_text, lease.fields["answer"], lease.seq, lease.least_version) == ("w11 w4", 1, 1, 3)
        assert (lease.group_size, list(lease.greedy)) == (3, [2]) and lease.sampling.temperature == pytest.approx(0.7) and lease.sampling.max_new_tokens == 5
        assert await actor.fulfil(lease, version=3, rewards=(0.0, 0.0, 0.0)) == [ACCEPTED] * 3
        last = await held_out(actor)
        receipts = await actor.submit(sample(last, 0, 3, reward=None), sample(last, 1, 4 - 1), sample(last, 1, 3), sample(last, 2, 3))
        assert [receipt.status for receipt in receipts] == [ACCEPTED, ACCEPTED, DUPLICATE, ACCEPTED]
        await eventually(lambda: results(config))
        line = results(config)[0]
        found = line["evaluation"]
        assert (line["step"], line["version"], found["ended"]) == (2, 3, "complete")
        # greedy 1, 0, 1; sampled means .5, 0, 1 (one of them unscored)
        assert (found["score"], found["greedy"]["num_prompts"], found["sampled"]["mean"]) == (pytest.approx(2 / 3), 3, 0.5)
        # pass@2: 1 - C(1,2)/C(2,2) = 1 for one right of two, 0 for none; the third has one score only
        assert found["pass_at_k"]["2"] == {"mean": 0.5, "standard_error": 0.5, "num_prompts": 2}
        assert [found[name] for name in ("wanted", "leased", "scored", "unscored", "lost")] == [9, 9, 8, 1, 0] and found["unscored_reasons"] == {"timeout": 1}
        assert found["tokens_by_version"] == {"3": 27}
        after = await status(actor)
        assert (after.num_trained, after.num_leased - after.num_open, dict(after.num_dropped)) == (before.num_trained, 4, {})
        assert after.evaluation.last.startswith("greedy 0.667 ± 0.333") and after.evaluation.last_step == 2
        assert (await actor.submit(sample(last, 0, 3)))[0].status == UNWANTED
        await actor.leave()


async def test_the_share_of_places_bounds_what_is_in_flight_and_training_goes_on(tmp_path: Path) -> None:
    config = evaluating(tmp_path, num_prompts=10, evaluation={"at_start": True, "share": 0.5}, staleness={"max_staleness": 4})
    async with running(config) as gateway:
        trainer, actor = Trainer(f"127.0.0.1:{gateway.port}", tmp_path / "shm"), Actor(f"127.0.0.1:{gateway.port}", config)
        await trainer.register()
        await trainer.close(0)
        await actor.attend(beating=False)
        await actor.beat(1, num_running=2, num_free=4)  # six places, three of them for evaluation
        await eventually(lambda: gateway._evaluation is not None and gateway._evaluation._running is not None)
        purposes = [lease.purpose for lease in await actor.lease(max_groups=8)]
        assert purposes.count(EVALUATION) == 3 and len(purposes) == 8
        await actor.leave()


async def test_a_lost_replica_frees_its_prompts_at_once_and_one_is_given_up_after_max_attempts(tmp_path: Path) -> None:
    lease = {"heartbeat_s": 0.1, "silence_s": 5.0, "lapse_s": 300.0, "max_attempts": 2}
    config = evaluating(tmp_path, num_prompts=1, evaluation={"at_start": True, "samples": 1}, lease=lease)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        _, first = await begun(address, tmp_path, config)
        second, third = Both(address, config, "b"), Actor(address, config, "c")
        await second.attend()
        await third.attend()
        lent = await held_out(first)
        assert (await first.submit(sample(lent, 0, 1)))[0].status == ACCEPTED
        await first.leave()
        again = await held_out(second)
        assert (again.group_id, again.attempt, list(again.done)) == (lent.group_id, 2, [0]) and again.lease_id != lent.lease_id
        await second.leave()  # and that was the last attempt
        await eventually(lambda: results(config))
        found = results(config)[0]["evaluation"]
        assert (found["ended"], found["leased"], found["scored"], found["lost"]) == ("attempts", 2, 1, 1)
        assert (await status(third)).evaluation.num_lost == 1
        await third.leave()


async def test_a_lapsed_prompt_is_lent_again(tmp_path: Path) -> None:
    lease = {"heartbeat_s": 0.1, "silence_s": 5.0, "lapse_s": 0.3}
    config = evaluating(tmp_path, num_prompts=1, evaluation={"at_start": True}, lease=lease)
    async with running(config) as gateway:
        _, actor = await begun(f"127.0.0.1:{gateway.port}", tmp_path, config)
        first, again = await held_out(actor), await held_out(actor)
        assert (again.group_id, again.attempt) == (first.group_id, 2)
        assert await actor.fulfil(first, rewards=(1.0,)) == [ACCEPTED] and await actor.fulfil(again, rewards=(0.0,)) in ([DUPLICATE], [UNWANTED])
        await actor.leave()


async def test_a_killed_gateway_goes_on_with_the_answers_it_had(tmp_path: Path) -> None:
    config = evaluating(tmp_path, num_prompts=2, evaluation={"at_start": True})
    child = Child(config)
    address = await child.start()
    _, actor = await begun(address, tmp_path, config)
    lent = await held_out(actor)
    await actor.fulfil(lent, rewards=(1.0,))
    assert child.process is not None
    child.process.kill()
    await child.process.wait()
    await actor.leave()
    address = await child.start()
    actor = Both(address, config)
    await actor.attend()
    assert (await actor.submit(sample(lent, 0, 1, reward=0.0)))[0].status == DUPLICATE
    left = await held_out(actor)
    assert left.group_id != lent.group_id and await actor.fulfil(left, rewards=(0.0,)) == [ACCEPTED]
    await eventually(lambda: results(config))
    found = results(config)[0]["evaluation"]
    assert (found["score"], found["leased"], found["scored"], found["lost"]) == (0.5, 2, 2, 0)
    await actor.leave()
    assert await child.stop() == 0


async def test_the_end_of_the_run_waits_for_the_last_evaluation_which_has_all_places(tmp_path: Path) -> None:
    config = evaluating(tmp_path, num_prompts=4, evaluation={"every_steps": None, "at_end": True}, steps=1)
    async with running(config) as gateway:
        trainer, actor = await begun(f"127.0.0.1:{gateway.port}", tmp_path, config, steps=1)
        ending = asyncio.create_task(the_end(trainer, config, 1))
        leases = await actor.lease(max_groups=4)
        assert [lease.purpose for lease in leases] == [EVALUATION] * 4 and not ending.done()
        for lease in leases:
            await actor.fulfil(lease, version=2, rewards=(1.0,))
        assert (await ending).end_of_run and results(config)[0]["step"] == 1 and results(config)[0]["evaluation"]["score"] == 1.0
        await actor.leave()


async def test_the_end_of_the_run_waits_no_longer_than_the_deadline(tmp_path: Path) -> None:
    config = evaluating(tmp_path, evaluation={"every_steps": None, "at_end": True, "deadline_s": 0.6}, steps=1)
    async with running(config) as gateway:
        trainer, actor = await begun(f"127.0.0.1:{gateway.port}", tmp_path, config, steps=1)
        started_s = time.monotonic()
        assert (await the_end(trainer, config, 1)).end_of_run and 0.5 < time.monotonic() - started_s < 10
        found = results(config)[0]["evaluation"]
        assert (found["ended"], found["score"], found["leased"], found["wanted"]) == ("deadline", None, 0, 3)
        await actor.leave()


async def test_a_rollback_behind_the_evaluated_step_gives_it_up_and_it_is_made_again(tmp_path: Path) -> None:
    config = evaluating(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        _, actor = await begun(address, tmp_path, config, steps=2)
        dead = await held_out(actor)
        newer = Trainer(address, tmp_path / "shm", incarnation=200)
        assert (await newer.register()).policy_step == 0
        await newer.close(0)
        assert (await actor.submit(sample(dead, 0, 3)))[0].status == UNWANTED
        for step in range(2):
            await newer.take(step)  # replayed
            await newer.close(step + 1)
        again = await held_out(actor)
        assert again.group_id != dead.group_id and again.least_version == 6
        own = (await status(actor)).evaluation
        assert (own.policy_step, own.num_lost, own.num_open) == (2, 1, 1)
        await actor.leave()


async def test_the_best_cut_by_held_out_score_stays_though_its_score_came_later_than_its_save(tmp_path: Path) -> None:
    best = {"metric": "evaluation.score"}
    config = evaluating(tmp_path, num_prompts=1, evaluation={"every_steps": 1}, checkpoint={"every_steps": 1, "keep": 1, "keep_best": best})
    kept = config.run_dir / "checkpoints"
    async with running(config) as gateway:
        trainer, actor = await begun(f"127.0.0.1:{gateway.port}", tmp_path, config)
        await train(trainer, actor, 0, will_save=True)
        await trainer.save(1, config.run_dir)
        lent = await held_out(actor)  # of step 1; not answered yet
        await train(trainer, actor, 1, will_save=True)
        await trainer.save(2, config.run_dir)
        assert [cut.policy_step for cut in cuts.all_marked(kept)] == [1, 2]  # the first might still be the best
        await actor.fulfil(lent, version=2, rewards=(0.9,))
        lent = await held_out(actor)  # the one of step 2 waited
        assert lent.least_version == 3
        await train(trainer, actor, 2, will_save=True)
        await trainer.save(3, config.run_dir)
        assert [cut.policy_step for cut in cuts.all_marked(kept)] == [1, 2, 3]
        await actor.fulfil(lent, version=3, rewards=(0.1,))
        await eventually(lambda: [cut.policy_step for cut in cuts.all_marked(kept)] == [1, 3])
        await actor.leave()


async def test_malformed_answers_are_refused_by_name(tmp_path: Path) -> None:
    config = evaluating(tmp_path, evaluation={"at_start": True})
    async with running(config) as gateway:
        _, actor = await begun(f"127.0.0.1:{gateway.port}", tmp_path, config)
        lent = await held_out(actor)
        for wrong, words in ((sample(lent, 1, 1), "outside the 1 samples"), (sample(lent, 0, 9), "names version 9"), (sample(lent, 0, 1, logprobs=None), "logprobs")):
            with pytest.raises(grpc.aio.AioRpcError, match=words):
                await actor.submit(wrong)
        await actor.leave()


async def test_held_out_prompts_that_cannot_be_read_end_the_run_with_one_line(tmp_path: Path) -> None:
    config = evaluating(tmp_path)
    assert config.evaluation is not None
    config.evaluation.prompts.write_text('{"prompt": 5}\n')
    with pytest.raises(ValueError, match="evaluation.prompts=.*line 1"):
        async with running(config) as gateway:
            await eventually(lambda: gateway._shelf.failure is not None)


@pytest.mark.parametrize(("asked", "words"), [
    ({"greedy": False}, "nothing would be asked"), ({"temperature": 0.5}, "greedy answers have no temperature"), ({"k": [4], "samples": 2}, "set samples to 4"),
    ({"k": [1, 1], "samples": 2}, "a k twice"), ({"every_steps": None}, "nothing would ever be evaluated"), ({"share": 0}, "share"), ({"temperature": 0.0, "samples": 1}, "temperature"),
])  # fmt: skip
def test_contradictions_fail_at_load(tmp_path: Path, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        evaluating(tmp_path, evaluation=asked)
