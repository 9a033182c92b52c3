"""Contradictions between the sections of a run file: pure, one line each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from learner.config import LearnerConfig
from protos.mistakes import check_address, one_line
from protos.security import SecurityConfig, resolve
from reward_server.config import RewardConfig
from reward_server.registry import unknown
from rollout_server.config import RolloutConfig
from rollout_server.environment_config import REMOTE

if TYPE_CHECKING:
    from deploy.schema import Placement, RewardSection, RolloutSection


def contradictions(
    learner: LearnerConfig, rollout: RolloutSection, reward: RewardSection | None, placement: Placement
) -> list[str]:
    """What cannot work, found without starting anything. Empty: nothing."""
    lines = [
        *_addresses(learner, rollout),
        *_own_addresses(learner, rollout, reward),
        *_wiring(learner, rollout, reward),
        *_lengths(learner, rollout),
        *_numbers(learner, rollout),
        *_files(learner),
        *_scorers(reward),
        *_gpus(learner, rollout, reward, placement),
        *_security(learner),
        *_metrics(learner, rollout, reward),
    ]
    return list(dict.fromkeys(lines))  # what is wrong for each of several data sets alike is said once


def _security(learner: LearnerConfig) -> Iterator[str]:
    try:
        resolve(learner.security, address=learner.address)
    except ValueError as error:
        yield str(error)
    if learner.security.certificate is not None and learner.security.ca is None:
        yield f"security.certificate={learner.security.certificate} without ca: the services of a run call each other, and would trust none of them; give ca"


def _metrics(learner: LearnerConfig, rollout: RolloutSection, reward: RewardSection | None) -> Iterator[str]:
    sections = [("learner", learner.metrics_address, 1), ("rollout", rollout.metrics_address, rollout.replicas), *([("reward", reward.metrics_address, reward.replicas)] if reward else [])]
    for name, address, count in sections:
        if not address:
            continue
        yield from _wrong(f"{name}.metrics_address", address, may_be_free=True, security=learner.security)
        if count > 1 and not address.endswith(":0"):
            yield f"{name}.metrics_address={address} with {name}.replicas={count}: only one of them could listen there; use port 0, or leave it empty"


def _wrong(key: str, address: str, *, may_be_free: bool = False, security: SecurityConfig | None = None) -> Iterator[str]:
    """What is wrong with an address. security: of a service that listens there."""
    try:
        check_address(key, address, may_be_free=may_be_free)
        if security is not None:
            resolve(security, address=address)
    except ValueError as error:
        yield str(error)


def _addresses(learner: LearnerConfig, rollout: RolloutConfig) -> Iterator[str]:
    for key, address, may_be_free in (("learner.address", learner.address, True), *(("rollout.rewards", address, False) for address in rollout.rewards)):
        yield from _wrong(key, address, may_be_free=may_be_free)


def _own_addresses(learner: LearnerConfig, rollout: RolloutSection, reward: RewardSection | None) -> Iterator[str]:
    """Of what a launcher starts: it finds a free address for each and tells it to the others."""
    for name, section in (("rollout", rollout), ("reward", reward)):
        if section is not None and section.address != type(section).model_fields["address"].default:
            yield f"{name}.address={section.address}: a launched run finds a free address for each of its servers and tells it to the others; remove it (`headrace serve {name}` listens where it is told)"
    if rollout.openai.address:
        yield from _wrong("rollout.openai.address", rollout.openai.address, may_be_free=True, security=learner.security)
    for environment in rollout.environments:
        if environment.is_remote:
            yield from _wrong(f"rollout.environments: {environment.name}: use", environment.use.removeprefix(REMOTE))
    most = rollout.scale.most if rollout.scale else rollout.replicas
    if rollout.openai.address and most > 1 and not rollout.openai.address.endswith(":0"):
        yield f"rollout.openai.address={rollout.openai.address} with {most} replicas: only one of them could listen there; use port 0"


def _wiring(learner: LearnerConfig, rollout: RolloutConfig, reward: RewardConfig | None) -> Iterator[str]:
    if reward is None and not rollout.rewards and not rollout.environments:
        yield "reward: missing, and rollout.rewards is empty: samples must be scored; add a reward section with a scorer, addresses in rollout.rewards, or rollout.environments that reward them"
    if reward is not None and rollout.rewards:
        yield f"rollout.rewards={list(rollout.rewards)} with a reward section: the launcher gives replicas the servers it starts; keep one of the two"
    if reward is not None and learner.scorer and learner.scorer not in [scorer.name for scorer in reward.scorers]:
        names = [scorer.name for scorer in reward.scorers]
        yield f"learner.scorer={learner.scorer!r} is none of reward.scorers {names}: every sample would be unscored; name one of them"
    if reward is not None and not rollout.score_groups:
        name = learner.scorer or reward.default or reward.scorers[0].name
        if any(scorer.name == name and (scorer.group or scorer.whole_group) for scorer in reward.scorers):
            yield f"scorer {name!r} compares whole groups and rollout.score_groups is false: every sample would be unscored; set rollout.score_groups: true"


def _lengths(learner: LearnerConfig, rollout: RolloutConfig) -> Iterator[str]:
    for name, one in learner.data.sources.items():
        yield from _lengths_of(learner, rollout, one.max_prompt_tokens, one.max_new_tokens, learner.data.key_of(name))


def _lengths_of(learner: LearnerConfig, rollout: RolloutConfig, longest: int | None, own_new: int | None, key: str) -> Iterator[str]:
    """Of one data set. own_new: its max_new_tokens, None: the run's."""
    new = own_new or learner.sampling.max_new_tokens
    where = f"learner.{key}.max_new_tokens" if own_new else "learner.sampling.max_new_tokens"
    if longest is not None and longest + new > rollout.max_model_len:
        yield (
            f"rollout.max_model_len={rollout.max_model_len} is less than learner.{key}.max_prompt_tokens + {where} = {longest} + {new} = {longest + new}: "
            f"long samples would be cut; set rollout.max_model_len to {longest + new} or more"
        )
    elif new >= rollout.max_model_len:
        yield (
            f"{where}={new} leaves no room for a prompt in rollout.max_model_len={rollout.max_model_len}; "
            "raise rollout.max_model_len or lower max_new_tokens"
        )
    try:
        positions = _max_positions(learner.model)
    except ValueError as error:
        yield str(error)
        return
    if positions is None:
        return
    if longest is not None and longest + new > positions:
        yield (
            f"learner.{key}.max_prompt_tokens={longest} with {where}={new}: the model {learner.model} reads {positions} positions; "
            f"use max_prompt_tokens of at most {max(positions - new, 0)}"
        )
    elif rollout.max_model_len > positions:
        yield f"rollout.max_model_len={rollout.max_model_len}: the model {learner.model} reads {positions} positions; set rollout.max_model_len to at most {positions}"


def _max_positions(model: str) -> int | None:
    """Positions that a local model folder declares; None for hub ids and models without a limit. Raises ValueError naming the file."""
    file = Path(model).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text())
        value = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
        return int(value) if value else None
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"model={model!r}: {file} is no model's configuration ({one_line(error)}); give a Hugging Face folder") from None


def _numbers(learner: LearnerConfig, rollout: RolloutConfig) -> Iterator[str]:
    served = learner.trainer.served_dtype
    if served != rollout.dtype:
        yield f"learner.trainer.served_dtype={served} differs from rollout.dtype={rollout.dtype}: pushed weights would not fit the engine; set both to {rollout.dtype}"
    trainer = learner.trainer
    rounded = rollout.dtype != "float32" if trainer.head_dtype == "float32" else trainer.compute_dtype != "float32"
    if trainer.head_dtype != rollout.head_dtype and rounded:
        yield (
            f"learner.trainer.head_dtype={trainer.head_dtype} differs from rollout.head_dtype={rollout.head_dtype}: logits that one side alone keeps in float32 move log-probs apart instead of together; "
            "set both to float32, or neither"
        )


def _files(learner: LearnerConfig) -> Iterator[str]:
    for name, one in learner.data.sources.items():
        key = f"learner.{learner.data.key_of(name)}"
        if one.format != "hub" and not one.prompts.exists():
            yield f"{key}.prompts={str(one.prompts)!r}: no such file (seen from {Path.cwd()}); give the path of a JSONL or Parquet file, or with {key}.format=hub an id on the hub"
        elif one.prompts.is_file() and one.prompts.stat().st_size == 0:
            yield f"{key}.prompts={str(one.prompts)!r}: the file is empty; give one with a JSON object a line"
    model = Path(learner.model).expanduser()
    if learner.model.startswith(("/", ".", "~")) and not (model / "config.json").is_file():
        yield f"model={learner.model!r}: {model / 'config.json'} does not exist; give a Hugging Face folder, or a hub id"


def _scorers(reward: RewardConfig | None) -> Iterator[str]:
    for index, scorer in enumerate(reward.scorers if reward else ()):
        if scorer.use and ":" not in scorer.use and (why := unknown(scorer.use)):
            yield f"reward.scorers.{index}.use: {why}"


def _gpus(learner: LearnerConfig, rollout: RolloutSection, reward: RewardSection | None, placement: Placement) -> Iterator[str]:
    ranks = placement.learner_gpus
    replicas = placement.rollout_gpus
    if ranks and len(ranks) != learner.trainer.ranks:
        yield f"placement.learner_gpus={list(ranks)} for learner.trainer.ranks={learner.trainer.ranks}: one GPU a rank; list {learner.trainer.ranks}"
    most, key = (rollout.scale.most, "rollout.scale.most") if rollout.scale else (rollout.replicas, "rollout.replicas")
    if replicas and len(replicas) != most:
        yield f"placement.rollout_gpus lists {len(replicas)} replicas, {key}={most}: one list a replica; make them agree"
    if placement.reward_gpus and len(placement.reward_gpus) != (reward.replicas if reward else 0):
        yield f"placement.reward_gpus lists {len(placement.reward_gpus)} servers, reward.replicas={reward.replicas if reward else 0}: one list a server; make them agree"
    for gpus in replicas:
        if len(gpus) != rollout.num_workers:
            sizes = {"tensor_parallel": rollout.tensor_parallel, "pipeline_parallel": rollout.pipeline_parallel, "engines": rollout.engines}
            words = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "tensor_parallel")
            yield f"placement.rollout_gpus has {list(gpus)} for rollout.{words}: as many GPUs as their product; list {rollout.num_workers}"
    used = [gpu for gpus in replicas for gpu in gpus]
    twice = sorted({gpu for gpu in used if used.count(gpu) > 1})
    if twice:
        yield f"placement.rollout_gpus gives GPU {twice} to two replicas: one engine a GPU; give each its own"
    both = sorted(set(ranks) & set(used))
    if both and learner.push.transport == "nccl":
        yield (
            f"learner.push.transport=nccl with GPU {both} in placement.learner_gpus={list(ranks)} and placement.rollout_gpus={[list(gpus) for gpus in replicas]}: "
            "NCCL refuses two ranks on one device; use transport auto or gloo, or separate GPUs"
        )
