"""The critic: values by hand, advantages over packed rows, its own optimizer, and a step in which it is trained alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModel

from learner.algorithm_config import AlgorithmConfig, CriticAdvantage, KlConfig
from learner.algorithms.gae import generalized_advantages
from learner.config import LearnerConfig, OptimizerConfig
from learner.trainer.companions import load_critic
from learner.trainer.critic import Critic, load_value_model
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.packing import Row, WeightedSample, dummy_row, pack
from learner.trainer.update import Course, train_step
from learner.trainer.values import token_rewards, with_advantages
from learner.trainer.world import World
from tests.learner.trainer import cuts, rig
from tests.learner.trainer.gradients import whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.llama(tmp_path_factory.mktemp("model") / "llama", tied=False)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def rows_of(num_groups: int = 3) -> list[Row]:
    made = rig.samples(num_groups, 4)
    return pack([WeightedSample(sample=s, advantage=float(s.sample_index == 0)) for s in made], row_tokens=40, share_prefix=True)


def test_a_value_is_that_of_the_state_the_token_was_drawn_in(folder: Path, mesh: DeviceMesh) -> None:
    critic, _ = cuts.critic_of(folder, mesh, torch.float32)
    plain = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    weight = torch.linspace(-0.3, 0.3, 36)
    by_behaviour: dict[float, float] = {}
    for s in rig.samples(3, 4):  # behaviour log-probs are distinct random numbers, so they name the token
        hidden = plain(torch.cat([s.prompt_ids, s.completion_ids])[None]).last_hidden_state[0]
        states = hidden[s.prompt_ids.numel() - 1 : -1] @ weight
        by_behaviour |= {float(b): float(v) for b, v in zip(s.behaviour, states.detach(), strict=True)}
    for row, (values,) in zip(rows_of(), ([v] for v in critic.values([rows_of()])[0]), strict=True):
        assert values.tolist() == pytest.approx([by_behaviour[float(b)] for b in row.behaviour], abs=1e-5)


def test_the_reward_comes_at_the_last_trained_token_and_the_price_of_kl_at_each() -> None:
    # tokens of samples 0, 0, 1; rewards 2 and -1; behaviour - reference = .5, -.25, 1 at coefficient .1, k1
    row = replace(
        dummy_row(), target=torch.zeros(3, dtype=torch.int64), sequence=torch.tensor([0, 0, 1]), num_sequences=2, advantage=torch.tensor([2.0, 2.0, -1.0]),
        behaviour=torch.tensor([-1.0, -1.0, -1.0]), reference=torch.tensor([-1.5, -0.75, -2.0]),
    )  # fmt: skip
    assert token_rewards(row, None).tolist() == [0.0, 2.0, -1.0]
    kl = KlConfig(coefficient=0.1, estimator="k1", where="reward", reference="frozen")
    assert token_rewards(row, kl).tolist() == pytest.approx([-0.05, 2.025, -1.1])


def test_advantages_of_a_batch_are_those_of_each_sample_and_whitened_over_all() -> None:
    torch.manual_seed(0)
    parts = [rows_of(2), rows_of(3)]
    values = [[torch.randn(row.num_targets) for row in part] for part in parts]
    config = CriticAdvantage(kind="gae", gamma=0.9, lam=0.8, whiten=False)
    plain = with_advantages(parts, values, config, None, lambda x: x)
    for part, given, made in zip(parts, values, plain, strict=True):
        for row, value, found in zip(part, given, made, strict=True):
            assert found.value is not None and found.returns is not None
            for number in range(row.num_sequences):
                own = row.sequence == number
                rewards = torch.zeros(int(own.sum()))
                rewards[-1] = row.advantage[own][-1]
                advantages, returns = generalized_advantages(rewards, value[own], gamma=0.9, lam=0.8)
                torch.testing.assert_close(found.advantage[own], advantages.float())
                torch.testing.assert_close(found.returns[own], returns.float())
    white = torch.cat([row.advantage for part in with_advantages(parts, values, config.model_copy(update={"whiten": True}), None, lambda x: x) for row in part])
    raw = torch.cat([row.advantage for part in plain for row in part])
    torch.testing.assert_close(white, (raw - raw.mean()) / raw.std(correction=0))


def step(folder: Path, mesh: DeviceMesh, *, course: Course, steps: int = 1, num: int = 2, algorithm: dict[str, Any] | None = None) -> tuple[Any, Any, Critic, list[Any]]:
    policy = rig.policy(folder, mesh)
    optimizer = Optimizer(policy.causal_lm.named_parameters(), OptimizerConfig(lr=1e-3))
    model = load_value_model(folder, mesh=mesh, compute_dtype=torch.float32)
    critic = Critic(model, Optimizer(model.named_parameters(), OptimizerConfig(lr=5e-3)), clip=None)
    objective = make_objective(AlgorithmConfig.model_validate({"name": "ppo", "kl": None, **(algorithm or {})}), max_new_tokens=8)
    made = rig.samples(3, 4)
    results = []
    for _ in range(steps):
        minibatches = objective.minibatches(rig.entries(made), num=num)
        results.append(train_step(policy, optimizer, made, minibatches, objective=objective, row_tokens=40, share_prefix=True, critic=critic, course=course))
    return policy, optimizer, critic, results


def test_it_learns_returns_while_the_actor_stands_still(folder: Path, mesh: DeviceMesh) -> None:
    before = {name: whole(p) for name, p in rig.policy(folder, mesh).causal_lm.named_parameters()}
    policy, optimizer, critic, results = step(folder, mesh, course=Course(epochs=2, actor=False), steps=8)
    losses = [result.sums["value_loss"] / result.sums["value_targets"] for result in results]
    assert losses[-1] < 0.3 * losses[0]
    assert (optimizer.num_updates, critic.optimizer.num_updates) == (0, 8 * 2 * 2)
    assert all(torch.equal(before[name], whole(p)) for name, p in policy.causal_lm.named_parameters())
    assert all(not result.updates and len(result.critic_updates) == 4 for result in results)


def test_epochs_go_over_the_batch_again_against_the_first_log_probs(folder: Path, mesh: DeviceMesh) -> None:
    _, optimizer, _, (result,) = step(folder, mesh, course=Course(epochs=3), algorithm={"old_policy": "recomputed"})
    assert len(result.updates) == len(result.critic_updates) == optimizer.num_updates == 6
    assert result.sums["targets"] == 3 * sum(s.num_trained_tokens for s in rig.samples(3, 4))
    # of one minibatch: 1 in the first epoch, and in the second only if that one's own log-probs were taken for the start
    for epochs, moved in ((1, False), (2, True)):
        _, _, _, (result,) = step(folder, mesh, course=Course(epochs=epochs), num=1, algorithm={"old_policy": "recomputed"})
        assert (abs(result.sums["ratio"] / result.sums["targets"] - 1) > 1e-5) is moved


def test_its_own_gradient_that_is_not_finite_skips_it_alone(folder: Path, mesh: DeviceMesh) -> None:
    policy, optimizer, critic, _ = step(folder, mesh, course=Course())
    model = critic.model
    model.head.bias.register_hook(lambda gradient: gradient * float("nan"))
    before = whole(model.head.weight)
    objective = make_objective(AlgorithmConfig.model_validate({"name": "ppo", "kl": None}), max_new_tokens=8)
    made = rig.samples(3, 4)
    result = train_step(policy, optimizer, made, objective.minibatches(rig.entries(made), num=1), objective=objective, row_tokens=40, share_prefix=True, critic=critic)
    assert critic.optimizer.num_skipped == 1 and torch.equal(whole(model.head.weight), before)
    assert not result.updates[0].skipped and result.critic_updates[0].skipped


def test_a_head_starts_from_a_reward_model_s_score(folder: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name != "lm_head.weight"}
    save_file({**weights, "score.weight": torch.arange(36.0)[None]}, tmp_path / "model.safetensors")
    model = load_value_model(tmp_path, mesh=mesh, compute_dtype=torch.float32)
    assert whole(model.head.weight)[0].tolist() == list(range(36)) and float(whole(model.head.bias)) == 0
    assert not whole(load_value_model(folder, mesh=mesh, compute_dtype=torch.float32).head.weight).any()


def settings(folder: Path, tmp_path: Path, **changes: Any) -> LearnerConfig:
    return LearnerConfig.model_validate({"run_dir": tmp_path, "model": str(folder), "data": {"prompts": "p"}, "algorithm": {"name": "ppo"}, **changes})


def test_a_critic_of_another_vocabulary_is_refused(folder: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(rank=0, size=1, device=torch.device("cpu"), mesh=mesh, incarnation=1)
    assert isinstance(load_critic(settings(folder, tmp_path), rig.policy(folder, mesh), folder, world), Critic)
    assert load_critic(settings(folder, tmp_path, algorithm={}), rig.policy(folder, mesh), folder, world) is None
    monkeypatch.setattr(rig, "VOCABULARY", 67)
    other = rig.llama(tmp_path / "other")
    with pytest.raises(ValueError, match=r"critic\.model has 67 tokens, the policy 61"):
        load_critic(settings(folder, tmp_path, critic={"model": str(other)}), rig.policy(folder, mesh), folder, world)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm": {"name": "grpo"}, "critic": {}}, "only advantage.kind=gae"),
        ({"critic": {"optimizer": {"epochs": 2}}}, "critic.optimizer.epochs=2"),
        ({"critic": {"warmup_steps": 100}}, "warmup_steps=100 is not less than steps=100"),
        ({"filter": {"zero_signal": True}}, "filter.zero_signal=true with advantage.kind=gae"),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], says: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        settings(folder, tmp_path, **changes)
