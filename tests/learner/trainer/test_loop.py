"""The loop of one rank against a FeedService in the same process, snapshot, push, cut, metrics and export included."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from learner.config import LearnerConfig
from learner.trainer import checkpoint, loop
from learner.trainer.checkpoint import Saver, restore
from learner.trainer.clock import Clock
from learner.trainer.companions import followed, load_companions, load_critic
from learner.trainer.export import export
from learner.trainer.feed import Feed, Leave, RunFailed
from learner.trainer.model import Policy
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.publish import Publisher
from learner.trainer.record import Recorder
from learner.trainer.world import World
from learner.weights.push import Pusher
from learner.weights.snapshot import SnapshotWriter
from protos.weights.staging import from_folder
from tests.learner.trainer import rig
from tests.learner.trainer.fake_feed import FakeFeed, serving
from tests.learner.trainer.gradients import whole

# Losses of four steps on fixed data. Derived by `pytest -s -k curve tests/learner/trainer/test_loop.py`, which prints them
# (torch 2.13 on a CPU, one thread; a change of a last digit is arithmetic, a change beyond the tolerance is a change of the method).
GOLDEN = [0.3454254, 0.269977, 0.3775534, 0.1741552]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def config(run_dir: Path, folder: Path, **changes: Any) -> LearnerConfig:
    values: dict[str, Any] = {
        "run_dir": run_dir, "model": str(folder), "steps": 4, "data": {"prompts": "unused"}, "sampling": {"temperature": rig.TEMPERATURE},
        "optimizer": {"lr": 1e-2, "warmup_updates": 2, "minibatches": 2}, "trainer": {"row_tokens": 40}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip
    return LearnerConfig.model_validate({**values, **changes})


def batches(step: int) -> tuple[list[Any], list[Any]]:
    made = rig.samples(3, 4, seed=100 + step)
    return rig.entries(made), made


def parts(mesh: DeviceMesh, settings: LearnerConfig, address: str, folder: Path, *, policy: Policy | None = None) -> loop.Parts:
    policy = policy or rig.policy(folder, mesh)
    companions = load_companions(settings, policy, folder, World(rank=0, size=1, device=torch.device("cpu"), mesh=mesh, incarnation=7))
    critic = load_critic(settings, policy, folder, World(rank=0, size=1, device=torch.device("cpu"), mesh=mesh, incarnation=7))
    optimizer = Optimizer(policy.causal_lm.named_parameters(), settings.optimizer, total_updates=settings.total_updates)
    objective = make_objective(settings.algorithm, max_new_tokens=settings.sampling.max_new_tokens)
    feed = Feed(address, incarnation=7, rank=0, patience_s=5.0)
    feed.register(1)
    writer = SnapshotWriter(policy.causal_lm, root=settings.run_dir / "snapshots", incarnation=7, served_dtype="float32", bucket_bytes=4096)
    pusher = Pusher(address=address, incarnation=7, rank=0, world_size=1, device=torch.device("cpu"), store_host="127.0.0.1")
    return loop.Parts(
        config=settings, feed=feed, companions=companions, objective=objective, policy=policy, optimizer=optimizer, critic=critic, publisher=Publisher(feed=feed, writer=writer, pusher=pusher),
        saver=Saver(folder=settings.run_dir / "checkpoints", model=policy.causal_lm, optimizer=optimizer, feed=feed, reference=lambda: followed(companions, critic), control=objective.control.state()),
        recorder=Recorder(settings.run_dir, active=True, clip=(0.2, 0.28)), clock=Clock(), stop=threading.Event(),
    )  # fmt: skip


def weights(made: loop.Parts) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in made.policy.causal_lm.named_parameters()}


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def unbroken(tmp_path: Path, folder: Path, mesh: DeviceMesh) -> Iterator[tuple[loop.Parts, FakeFeed, loop.End]]:
    """A run of four steps from end to end."""
    fake = FakeFeed(batches, num_steps=4)
    with serving(fake) as address:
        moving = {"adaptive": {"highest": 2, "low": 0.01, "high": 0.05}}
        made = parts(mesh, config(tmp_path, folder, staleness=moving), address, folder)
        end = loop.run(made, 0)
        made.saver.wait()
        yield made, fake, end
        made.publisher.pusher.close(timeout_s=5)
        made.feed.close()


def test_the_measured_mismatch_goes_with_each_publication_but_the_first(unbroken: tuple[loop.Parts, FakeFeed, loop.End]) -> None:
    made, fake, _ = unbroken
    first, *others = fake.named("CloseBatch")
    assert not first.HasField("mismatch")
    assert [r.mismatch for r in others] == [line["mismatch_kl"] for line in lines(made.config.run_dir)] and all(r.mismatch > 0 for r in others)


def test_every_step_is_taken_closed_and_published_and_cuts_are_announced(unbroken: tuple[loop.Parts, FakeFeed, loop.End]) -> None:
    made, fake, end = unbroken
    assert end.finished and end.published.policy_step == 4
    assert [r.policy_step for r in fake.named("TakeBatch")] == [0, 1, 2, 3, 4]
    assert [(r.policy_step, r.will_save) for r in fake.named("CloseBatch")] == [(0, False), (1, False), (2, True), (3, False), (4, True)]
    assert [(r.policy_step, r.error) for r in fake.named("SaveCut")] == [(2, ""), (4, "")]
    assert [line["step"] for line in lines(made.config.run_dir)] == [1, 2, 3, 4]
    last = lines(made.config.run_dir)[-1]
    assert last["version"] == 5 and last["num_updates"] == 2 and not last["no_signal"] and last["grad_norm"] > 0
    assert last["reward_mean"] == pytest.approx(0.25) and last["completion_tokens_max"] <= 6
    assert len((made.config.run_dir / "samples.jsonl").read_text().splitlines()) == 16


def test_resumed_from_a_cut_equals_unbroken(unbroken: tuple[loop.Parts, FakeFeed, loop.End], tmp_path: Path, folder: Path, mesh: DeviceMesh) -> None:
    whole_run, _, _ = unbroken
    fake = FakeFeed(batches, num_steps=4)
    with serving(fake) as address:
        resumed = parts(mesh, config(tmp_path / "again", folder), address, folder)
        step = restore(whole_run.config.run_dir / "checkpoints" / "step-000002", resumed.policy.causal_lm, resumed.optimizer)
        assert (step, resumed.optimizer.num_updates) == (2, 4)
        loop.run(resumed, step)
        resumed.saver.wait()
        resumed.publisher.pusher.close(timeout_s=5)
        resumed.feed.close()
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, weights(whole_run)[name]), name
    assert resumed.optimizer.num_updates == whole_run.optimizer.num_updates == 8


@pytest.mark.parametrize("reference", [
    {"reference": "ema", "decay": 0.5}, {"reference": "periodic", "every_steps": 3}, {"reference": "periodic", "every_steps": 1}, {"reference": "frozen"},
])  # fmt: skip
def test_every_form_of_reference_and_the_factor_of_its_pull_come_back_with_the_cut(reference: dict[str, Any], tmp_path: Path, folder: Path, mesh: DeviceMesh) -> None:
    algorithm = {"kl": {"coefficient": 0.1, "adaptive": {"target": 1e-3, "horizon_steps": 4}, **reference}}
    ends = []
    for name in ("unbroken", "resumed"):
        with serving(FakeFeed(batches, num_steps=4)) as address:
            made = parts(mesh, config(tmp_path / name, folder, algorithm=algorithm), address, folder)
            control = made.objective.control.state()
            cut = tmp_path / "unbroken" / "checkpoints" / "step-000002"
            step = 0 if name == "unbroken" else restore(cut, made.policy.causal_lm, made.optimizer, followed(dict(made.companions)), control)
            loop.run(made, step)
            made.saver.wait()
            made.publisher.pusher.close(timeout_s=5)
            made.feed.close()
        ends.append((checkpoint._copy(followed(dict(made.companions)), None), weights(made), made.objective.control.factor))
    (kept, policy, factor), (kept_again, policy_again, factor_again) = ends
    assert bool(kept) is (reference["reference"] != "frozen") and all(torch.equal(kept[n], kept_again[n]) for n in kept)
    assert all(torch.equal(policy[n], policy_again[n]) for n in policy) and factor == factor_again != 1.0
    assert lines(tmp_path / "unbroken")[-1]["kl_factor"] == lines(tmp_path / "resumed")[-1]["kl_factor"] == factor
    same = {n for n, t in kept.items() if torch.equal(t, policy[n])}
    assert (same == kept.keys()) is (reference.get("every_steps") == 1 or not kept)  # copied in step 4 only where every step is one


def test_the_first_version_after_a_resume_is_the_policy_and_not_the_reference_beside_it(tmp_path: Path, folder: Path, mesh: DeviceMesh) -> None:
    # faults.md 17: a reference is loaded, the run goes on from step 2, and what replicas get before the first prompt is the policy of step 2
    changes = {"steps": 2, "algorithm": {"kl": {"coefficient": 0.1, "reference": "frozen"}}}
    ends = []
    for name in ("unbroken", "resumed"):
        with serving(FakeFeed(batches, num_steps=2)) as address:
            made = parts(mesh, config(tmp_path / name, folder, **changes), address, folder)
            cut = tmp_path / "unbroken" / "checkpoints" / "step-000002"
            loop.run(made, 0 if name == "unbroken" else restore(cut, made.policy.causal_lm, made.optimizer))
            made.saver.wait()
            made.publisher.pusher.close(timeout_s=5)
            made.feed.close()
        ends.append(weights(made))
    base = {name: whole(p) for name, p in rig.policy(folder, mesh).causal_lm.named_parameters()}
    served = dict(from_folder(tmp_path / "resumed" / "snapshots" / "7-2").tensors())
    assert served.keys() == ends[0].keys() and all(torch.equal(served[name], ends[0][name]) for name in served)
    assert not any(torch.equal(served[name], base[name]) for name in served)


def test_ppo_resumed_from_a_cut_equals_unbroken_critic_and_its_schedule_included(tmp_path: Path, folder: Path, mesh: DeviceMesh) -> None:
    # one step of the critic alone, then both; its weights, moments and count of updates come back
    changes = {"algorithm": {"name": "ppo"}, "critic": {"warmup_steps": 1, "optimizer": {"lr": 1e-2, "schedule": "linear"}}, "optimizer": {"lr": 1e-2, "minibatches": 2, "epochs": 2}}
    ends = []
    for name in ("unbroken", "resumed"):
        with serving(FakeFeed(batches, num_steps=4)) as address:
            made = parts(mesh, config(tmp_path / name, folder, **changes), address, folder)
            assert made.critic is not None
            step = 0
            if name == "resumed":
                step = restore(tmp_path / "unbroken" / "checkpoints" / "step-000002", made.policy.causal_lm, made.optimizer, followed(dict(made.companions), made.critic))
                made.critic.restored()
                assert (made.optimizer.num_updates, made.critic.optimizer.num_updates) == (4, 8)
            loop.run(made, step)
            made.saver.wait()
            made.publisher.pusher.close(timeout_s=5)
            made.feed.close()
        ends.append((checkpoint._copy(dict(made.critic.state()), None), weights(made)))
    for left, right in zip(*ends, strict=True):
        assert left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)
    seen = lines(tmp_path / "unbroken")
    assert [line["num_updates"] for line in seen] == [0, 4, 4, 4] and [line["critic"]["num_updates"] for line in seen] == [4, 4, 4, 4]
    assert not any(line["no_signal"] for line in seen) and seen[-1]["critic"]["lr"] == pytest.approx(1e-2 / 16)  # the last of 16 updates


def test_a_reference_waits_for_the_copy_also_after_a_step_without_an_update(tmp_path: Path, folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable_after_the_first(step: int) -> tuple[list[Any], list[Any]]:
        table, made = batches(step)
        return ([replace(entry, usable=False, unusable_reason="unscored") for entry in table] if step else table), made

    copy, seen = checkpoint._copy, []

    def slow_copy(value: Any, into: Any) -> Any:
        if isinstance(value, dict) and "reference" in value:
            before = {name: tensor.clone() for name, tensor in value["reference"].items()}
            time.sleep(2.0)  # a step without rows takes some tenths of a second
            seen.append((before, copy(value, into)["reference"]))
        return copy(value, into)

    monkeypatch.setattr(checkpoint, "_copy", slow_copy)
    algorithm = {"kl": {"coefficient": 0.1, "reference": "ema", "decay": 0.5}}
    with serving(FakeFeed(unusable_after_the_first, num_steps=2)) as address:
        made = parts(mesh, config(tmp_path, folder, algorithm=algorithm, checkpoint={"every_steps": 1}), address, folder)
        loop.run(made, 0)
        made.saver.wait()
        made.publisher.pusher.close(timeout_s=5)
        made.feed.close()
    assert lines(tmp_path)[-1]["num_updates"] == 0 and len(seen) == 2
    for before, copied in seen:
        assert all(torch.equal(before[name], copied[name]) for name in before)
    (_, first), (_, second) = seen
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_exported_model_loads_in_transformers_with_equal_values(unbroken: tuple[loop.Parts, FakeFeed, loop.End], folder: Path) -> None:
    made, _, end = unbroken
    out = made.config.run_dir / "model"
    export(snapshot_dir=end.published.snapshot.folder, model_dir=folder, out_dir=out)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and loaded.dtype == torch.float32
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights(made)[name]), name
    assert "lm_head.weight" not in load_file(out / "model.safetensors")  # faults.md 119: the tied head once
    assert (out / "generation_config.json").exists()


def test_loss_curve_is_the_recorded_one(unbroken: tuple[loop.Parts, FakeFeed, loop.End]) -> None:
    made, _, _ = unbroken
    losses = [line["loss"] for line in lines(made.config.run_dir)]
    print(f"losses: {losses}")
    assert losses == pytest.approx(GOLDEN, abs=2e-5)


def test_told_to_stop_the_rank_saves_and_leaves_after_the_running_step(tmp_path: Path, folder: Path, mesh: DeviceMesh) -> None:
    fake = FakeFeed(batches, num_steps=100)
    with serving(fake) as address:
        made = parts(mesh, config(tmp_path, folder, steps=100, checkpoint={"every_steps": None}), address, folder)
        made.stop.set()
        end = loop.run(made, 0)
        made.saver.wait()
        made.publisher.pusher.close(timeout_s=5)
        made.feed.close()
    assert not end.finished and end.published.policy_step == 1
    assert [(r.policy_step, r.error) for r in fake.named("SaveCut")] == [(1, "")]


def test_no_signal_changes_neither_weights_nor_moments_nor_schedule(tmp_path: Path, folder: Path, mesh: DeviceMesh) -> None:
    # faults.md 79: every group flat, so there is no token to train on; the step still closes and publishes.
    def flat(step: int) -> tuple[list[Any], list[Any]]:
        table, made = batches(step)
        return [replace(entry, reward=0.4) for entry in table], made

    fake = FakeFeed(lambda step: batches(step) if step == 0 else flat(step), num_steps=1)
    with serving(fake) as address:
        made = parts(mesh, config(tmp_path, folder), address, folder)
        loop.run(made, 0)
        before = weights(made), {k: whole(v) for k, v in made.optimizer.state().items()}
        fake._num_steps = 2
        loop.run(made, 1)
        after = weights(made), {k: whole(v) for k, v in made.optimizer.state().items()}
        made.saver.wait()
        made.publisher.pusher.close(timeout_s=5)
        made.feed.close()
    for left, right in zip(before, after, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert made.optimizer.num_updates == 2
    last = lines(tmp_path)[-1]
    assert last["no_signal"] and last["num_updates"] == 0 and last["zero_signal_share"] == 1.0
    assert fake.named("CloseBatch")[-1].policy_step == 2


def test_a_run_that_cannot_go_on_says_why(tmp_path: Path, folder: Path, mesh: DeviceMesh) -> None:
    fake = FakeFeed(batches, num_steps=4)
    fake.abort = (grpc.StatusCode.ABORTED, "256 groups dropped one after another")
    with serving(fake) as address:
        feed = Feed(address, incarnation=7, rank=0, patience_s=5.0)
        with pytest.raises(RunFailed, match="256 groups dropped"):
            feed.take_batch(0, stop=threading.Event())
        feed.close()


def test_a_rank_told_to_stop_does_not_wait_long_for_a_batch(tmp_path: Path) -> None:
    class Silent(FakeFeed):
        async def TakeBatch(self, request: Any, context: Any) -> Any:
            await asyncio.sleep(60)
            yield None

    stop = threading.Event()
    stop.set()
    with serving(Silent(batches, num_steps=4)) as address:
        feed = Feed(address, incarnation=7, rank=0, leave_s=1.0)
        with pytest.raises(Leave, match=r"step 3, and no gateway answered within 1 s \(checkpoint.leave_s\): there is no cut"):
            feed.take_batch(3, stop=stop)
        feed.close()
