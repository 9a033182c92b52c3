"""Several data sets through a running gateway: who gets which prompt, what scorers and trainers are told, and what status and audit say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.audit.program import audit
from deploy.status import lines
from learner.config import LearnerConfig
from protos.learner.v1alpha1 import learner_pb2
from tests.learner.gateway.gateway_harness import Actor, Trainer, config_in, eventually, running


def two_sets(folder: Path, **changes: Any) -> LearnerConfig:
    """"short": 3 prompts, groups of 2; "long": 4 prompts, groups of 3, longer answers, tracked. Turn by turn, short first."""
    for name, first, num in (("short", 2, 3), ("long", 10, 4)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"w{first + n} w3", "answer": n}) + "\n" for n in range(num)))
    sets = {
        "short": {"prompts": folder / "short.jsonl"},
        "long": {"prompts": folder / "long.jsonl", "group_size": 3, "max_new_tokens": 12, "zero_signal": True, "curriculum": {"kind": "band"}, "replay": {"requeue": ["zero_signal"]}},
    }
    return config_in(folder, data={"template": "raw", "shuffle": False, "sets": sets}, **changes)


async def test_groups_carry_their_sets_name_size_and_length_all_the_way(tmp_path: Path) -> None:
    config = two_sets(tmp_path, staleness={"max_staleness": 2})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
        await trainer.register()
        version = (await trainer.close(0)).version
        await actor.attend(loaded_version=version)
        first, second, third, fourth = await actor.lease(max_groups=4)
        assert [lease.fields["data_set"] for lease in (first, second, third, fourth)] == ["short", "long"] * 2
        assert [(lease.group_size, lease.sampling.max_new_tokens, lease.prompt_id) for lease in (first, second)] == [(2, 8, "1"), (3, 12, "1")]
        assert first.fields["answer"] == 0.0
        assert [lease.prompt_text for lease in (second, fourth)] == ["w10 w3", "w11 w3"]
        await actor.fulfil(first, version)
        await actor.fulfil(second, version, rewards=(1.0, 0.0, 1.0))
        await actor.fulfil(third, version, rewards=(1.0, 1.0))  # no signal, but only `long` drops for that
        await actor.fulfil(fourth, version, rewards=(1.0, 1.0, 1.0))
        header, _ = await trainer.take(0)
        assert [(row.data_set, row.sample_index) for row in header.table] == [("short", 0), ("short", 1), ("long", 0), ("long", 1), ("long", 2)]
        again = (await actor.lease(max_groups=1))[0]
        assert (again.fields["data_set"], again.prompt_id) == ("short", "3")
        again = (await actor.lease(max_groups=1))[0]
        assert (again.fields["data_set"], again.prompt_id) == ("long", "2")  # dropped for zero signal: given again
        status = await actor.stub.GetStatus(learner_pb2.GetStatusRequest())
        said = list(lines(status))
        assert "data short: 3 prompts; 3 groups given" in said
        # prompts 1 (2 of 3 passed: inside), 2 (all passed: outside, and given again), 3 and 4 not measured
        assert "data long: 4 prompts; 3 groups given; in 3, outside 1, solved 0, parked 0, again 0; again 1, measured 2" in said
        await trainer.close(1, will_save=True)
        await trainer.save(1, config.run_dir)
        await actor.leave()
    (config.run_dir / "resolved" / "learner.json").write_text(config.model_dump_json())
    result = audit(config.run_dir)
    assert [str(finding) for finding in result.findings.found if not str(finding).startswith("a cut is whole: ")] == []  # a fake trainer's files are no model


async def test_a_field_that_the_sets_name_would_hide_is_refused(tmp_path: Path) -> None:
    config = two_sets(tmp_path)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "w5", "data_set": "mine"}) + "\n")
    with pytest.raises(ValueError, match=r"data.sets.long.prompts=.*: prompt '1' has a field `data_set`, .* give it another name with data.sets.long.fields"):
        async with running(config) as gateway:
            await eventually(lambda: gateway._shelf.failure is not None)


async def test_a_gateway_that_was_killed_goes_on_with_the_next_prompt_of_each_set(tmp_path: Path) -> None:
    # faults.md 114
    config = two_sets(tmp_path)
    async with running(config) as gateway:
        trainer, actor = Trainer(f"127.0.0.1:{gateway.port}", tmp_path / "shm"), Actor(f"127.0.0.1:{gateway.port}", config)
        await trainer.register()
        version = (await trainer.close(0)).version
        await actor.attend(loaded_version=version)
        for lease in await actor.lease(max_groups=3):
            await actor.fulfil(lease, version, rewards=(0.0, 1.0, 0.0)[: lease.group_size])
        before = gateway._books.ledger.state()
        await actor.leave()
    async with running(config) as gateway:
        assert gateway._books.ledger.state() == before
        actor = Actor(f"127.0.0.1:{gateway.port}", config, incarnation=2)
        await eventually(lambda: gateway._shelf.catalog is not None)
        await actor.attend(loaded_version=version)
        (lease,) = await actor.lease(max_groups=4)  # four may be open
        assert (lease.fields["data_set"], lease.prompt_id) == ("long", "2")
        await actor.leave()
