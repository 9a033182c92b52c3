"""A run folder goes on only as the run that it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.config import LearnerConfig
from tests.learner.gateway import scenes
from tests.learner.gateway.gateway_harness import Actor, Trainer, config_in, eventually, running


def prompts_of(config: LearnerConfig) -> Path:
    assert config.data.prompts is not None
    return config.data.prompts


async def begun(folder: Path) -> LearnerConfig:
    """A run of one step with its cut; it began with P = 2, G = 2, S = 1."""
    config = config_in(folder)
    async with scenes.begun(config, folder) as at:
        await at.step(0, will_save=True)
        await at.trainer.save(1, config.run_dir)
    return config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups_per_step": 4}, "groups_per_step=4, was 2"),
        ({"sampling": {"group_size": 4, "max_new_tokens": 8}}, "sampling.group_size=4, was 2"),
        ({"sampling": {"group_size": 2, "max_new_tokens": 8, "temperature": 0.5}}, "sampling.temperature=0.5, was 1.0"),
        ({"staleness": {"max_staleness": 0}}, "staleness.max_staleness=0, was 1"),
        ({"seed": 7}, "seed=7, was 0"),
    ],
)
async def test_a_setting_that_the_account_rests_on_cannot_change(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = await begun(tmp_path)
    changed = LearnerConfig.model_validate({**config.model_dump(), **changes})
    with pytest.raises(ValueError) as caught:
        async with running(changed):
            pass
    assert words in str(caught.value) and "use another run_dir" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


async def test_another_model_cannot_go_on_with_the_run(tmp_path: Path) -> None:
    config = await begun(tmp_path)
    (Path(config.model) / "model.safetensors").write_bytes(b"other weights of one size")
    with pytest.raises(ValueError, match="digest of model="):
        async with running(config):
            pass


async def test_other_prompts_cannot_go_on_with_the_run(tmp_path: Path) -> None:
    config = await begun(tmp_path)
    prompts_of(config).write_text(json.dumps({"prompt": "w9 w9", "answer": 0}) + "\n")
    with pytest.raises(ValueError, match="but this run began with"):
        async with running(config) as gateway:
            await eventually(lambda: gateway._shelf.failure is not None)


async def test_other_prompts_begin_anew_where_that_is_asked_for_and_unfinished_groups_are_dropped(tmp_path: Path) -> None:
    # faults.md 114
    config = await begun(tmp_path)
    changed = LearnerConfig.model_validate({**config.model_dump(), "data": {**config.data.model_dump(), "on_change": "restart"}})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, tmp_path / "shm", incarnation=200), Actor(address, config, incarnation=2)
        await trainer.register()
        version = (await trainer.close(1)).version
        await actor.attend(loaded_version=version)
        complete, unfinished = await actor.lease(max_groups=2)
        assert [complete.prompt_id, unfinished.prompt_id] == ["3", "4"]  # 1 and 2 were trained: the next is saved + 1
        await actor.fulfil(complete, version)
        await actor.leave()
    prompts_of(config).write_text("".join(json.dumps({"prompt": f"w9 w{n}", "answer": n}) + "\n" for n in range(2, 6)))
    async with running(changed) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        actor = Actor(address, config, incarnation=3)
        await eventually(lambda: gateway._shelf.catalog is not None)
        await actor.attend(loaded_version=version)
        leases = await actor.lease(max_groups=2)
        assert [lease.prompt_text for lease in leases] == ["w9 w2", "w9 w3"]  # at 0
        counts = gateway._books.ledger.counts()
        assert counts.dropped == {"data_changed": 1} and counts.waiting == 1
        await actor.leave()
    async with running(changed.model_copy(update={"data": changed.data.model_copy(update={"on_change": "refuse"})})) as gateway:
        await eventually(lambda: gateway._shelf.catalog is not None)  # these are the run's data now


async def test_fewer_steps_than_were_done_are_refused(tmp_path: Path) -> None:
    config = await begun(tmp_path)
    cut = config.run_dir / "checkpoints" / "step-000001"
    cut.rename(cut.with_name("step-000003"))
    marker = cut.with_name("step-000003") / "cut.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "policy_step": 3}))
    with pytest.raises(ValueError, match=r"steps=2, but the run in .* has done 3 .*; ask for 3 or more, or use another run_dir"):
        async with running(config.model_copy(update={"steps": 2})):
            pass


async def test_what_does_not_matter_to_the_account_may_change(tmp_path: Path) -> None:
    config = await begun(tmp_path)
    changed = config.model_copy(update={"steps": 20, "optimizer": config.optimizer.model_copy(update={"lr": 3e-6})})
    async with running(changed) as gateway:
        assert (await Trainer(f"127.0.0.1:{gateway.port}", tmp_path / "shm", incarnation=200).register()).policy_step == 1


async def test_a_run_that_never_had_its_prompts_is_founded_by_the_next_start(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    good = prompts_of(config).read_text()
    prompts_of(config).write_text("{not json\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        async with running(config) as gateway:
            await eventually(lambda: gateway._shelf.failure is not None)
    prompts_of(config).write_text(good)
    async with running(config.model_copy(update={"seed": 9})) as gateway:
        await eventually(lambda: gateway._shelf.catalog is not None)


async def test_a_stop_id_that_the_model_cannot_draw_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path, sampling={"group_size": 2, "max_new_tokens": 8, "stop_token_ids": (1, 32)})
    with pytest.raises(ValueError, match=r"sampling.stop_token_ids=\[32\]: the model .* has ids below 32"):
        async with running(config):
            pass
