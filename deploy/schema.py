"""One YAML file describes a run: the learner, the rollout replicas, the reward servers.

`load(path)` gives a checked `RunFile`; whatever is wrong with it comes as `Mistakes`, a line for each.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from deploy.checks import contradictions
from deploy.cluster.apply import fill, layout_mistakes, ranks_by_machine
from deploy.cluster.config import ClusterConfig, Roles, Scale
from deploy.cluster.devices import devices_of
from deploy.cluster.dimensions import cuts_of, gpus_of_replica
from deploy.cluster.fits import memory_mistakes
from deploy.lines import lines_of, located
from deploy.mistakes import Mistakes, of_validation
from learner.config import LearnerConfig, Section
from protos import yaml_text
from protos.security import SecurityConfig
from protos.stacks import RUN_VARIABLE
from reward_server.config import RewardConfig
from rollout_server.config import RolloutConfig

Replicas = Annotated[int, Field(ge=1)]


class RolloutSection(RolloutConfig):
    """Fields of rollout_server/config.py, for each of the replicas alike."""

    replicas: Replicas = 1
    scale: Scale | None = Field(None, description="None: as many replicas throughout")

    @model_validator(mode="after")
    def _within(self) -> RolloutSection:
        if self.scale is not None and not self.scale.least <= self.replicas <= self.scale.most:
            raise ValueError(f"replicas={self.replicas} is outside scale.least={self.scale.least} to most={self.scale.most}: a run begins with it; use one inside")
        return self


class RewardSection(RewardConfig):
    """Fields of reward_server/config.py, for each of the replicas alike."""

    replicas: Replicas = 1


class Placement(Section):
    """Which GPUs of this machine each process sees. Empty: what the environment shows."""

    learner_gpus: tuple[int, ...] = Field((), description="one a rank")
    rollout_gpus: tuple[tuple[int, ...], ...] = Field((), description="a list for each replica, with rollout.scale for the most that may run")
    reward_gpus: tuple[tuple[int, ...], ...] = Field((), description="a list for each reward server")


class ModelSizes(Section):
    """Sizes of a model that is not in a folder here. Example: `{parameters_b: 13, layers: 40, hidden: 5120, heads: 40, vocab: 32000}`"""

    parameters_b: float = Field(gt=0, description="billions")
    layers: Replicas
    hidden: Replicas
    heads: Replicas
    kv_heads: Replicas | None = Field(None, description="None: as many as heads")
    head_width: Replicas | None = Field(None, description="None: hidden / heads")
    vocab: Replicas


class Observability(Section):
    """How a run is watched (docs/operating.md)."""

    metrics: bool = Field(True, description="every service tells its figures on a port of its own, and run_dir/prometheus.yml says where")
    scrape_s: float = Field(5.0, ge=0.1, description="how often Prometheus asks every service, as run_dir/prometheus.yml tells it")
    host: str = Field("127.0.0.1", min_length=1, description="where these ports listen; others than this machine reach them only under `security`")


class RunFile(Section):
    """A whole run.

    Example (YAML):
        run_dir: runs/first
        model: models/smollm2
        learner: {steps: 50, data: {prompts: train.jsonl}}
        rollout: {replicas: 2}
        reward: {scorers: [{name: answer, use: last_number}]}
    """

    run_dir: Path
    model: str = Field(description="Hugging Face folder or hub id, for the learner and the replicas")
    learner: LearnerConfig
    rollout: RolloutSection
    reward: RewardSection | None = Field(None, description="None: rollout.rewards names servers that run elsewhere")
    cluster: ClusterConfig | None = Field(None, description="None: this machine, as `placement` says")
    roles: Roles | None = Field(None, description="with cluster only")
    model_sizes: dict[str, ModelSizes] = Field({}, description="of models that are named by hub id, for the estimates of memory and speed")
    placement: Placement = Placement()
    observability: Observability = Observability()
    security: SecurityConfig = Field(SecurityConfig(), description="of every service of the run")

    def ranks_by_machine(self) -> list[int]:
        """Ranks of the learner on each machine; one number: they are the learner's own children."""
        return [self.learner.trainer.ranks] if self.cluster is None or self.roles is None else ranks_by_machine(self.cluster, self.roles)

    def num_gpus(self) -> dict[str, int]:
        """GPUs of one process, by its role among processes; without `cluster` none are known."""
        if self.cluster is None or self.roles is None:
            return {}
        cuts, found = cuts_of(self.cluster, self.roles), {}
        if self.roles.actor.gpu_group:
            ranks = self.ranks_by_machine()
            found["ranks" if len(ranks) > 1 else "learner"] = ranks[0]
        if self.roles.rollout.gpu_group:
            found["rollout"] = gpus_of_replica(cuts["rollout"])
        if self.roles.reward_model is not None and self.roles.reward_model.gpu_group:
            found["reward"] = len(devices_of(self.cluster)[self.roles.reward_model.gpu_group]) // cuts["reward_model"]["data"]
        return found

    def machines_of(self) -> dict[str, str]:
        """Node group of each role among processes; missing: any machine."""
        if self.cluster is None or self.roles is None:
            return {}
        roles = {"learner": self.roles.actor, "ranks": self.roles.actor, "rollout": self.roles.rollout, "reward": self.roles.reward_model}
        places = {name: self.cluster.gpu_groups[role.gpu_group].nodes if role.gpu_group else role.node_group for name, role in roles.items() if role is not None}
        return {name: place for name, place in places.items() if place}

    def environment(self) -> dict[str, str]:
        """Variables that every process of the run gets."""
        own = {RUN_VARIABLE: str(self.run_dir.resolve())}
        if self.cluster is None:
            return own
        return {**own, **self.cluster.communication.environment(), "HEADRACE_LOG_LEVEL": self.cluster.logging.level}


def load(path: Path, *, overrides: dict[str, Any] | None = None) -> RunFile:
    """The run described by `path`, with dotted `overrides` on top. Raises Mistakes."""
    content = read_yaml(path)
    try:
        return parse(content, where=str(path), overrides=overrides)
    except Mistakes as mistakes:
        lines = lines_of(path.read_text())
        raise Mistakes([located(line, str(path), lines) for line in mistakes.lines]) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A file's mapping. Raises Mistakes when it cannot be read or is something else."""
    try:
        content = yaml_text.read(path.read_text())
    except OSError as error:
        raise Mistakes([f"{path}: cannot be read: {error.strerror}; give the path of a YAML file"]) from None
    except UnicodeDecodeError as error:
        raise Mistakes([f"{path}: not a text file ({error.reason} at byte {error.start}); give the path of a YAML file"]) from None
    except yaml.YAMLError as error:
        raise Mistakes([f"{path}: not YAML: {' '.join(str(error).split())}; correct that place"]) from None
    if not isinstance(content, dict):
        raise Mistakes([f"{path}: must hold a mapping of keys, got {type(content).__name__}; see deploy/templates for examples"])
    return content


def parse(content: dict[str, Any], *, where: str, overrides: dict[str, Any] | None = None) -> RunFile:
    """A checked run from a mapping; `where` stands in front of every message. Raises Mistakes."""
    content = with_overrides(content, overrides or {})
    mistakes = [*_share(content), *_lay_out(content)]
    if mistakes:
        raise Mistakes([f"{where}: {line}" for line in mistakes])
    try:
        run = RunFile.model_validate(content)
    except ValidationError as error:
        raise of_validation(error, where) from None
    mistakes = [*contradictions(run.learner, run.rollout, run.reward, run.placement), *(memory_mistakes(run) if run.cluster else [])]
    if mistakes:
        raise Mistakes([f"{where}: {line}" for line in mistakes])
    return run


def _lay_out(content: dict[str, Any]) -> list[str]:
    """Fills in what `cluster` and `roles` say of the other sections; what cannot be laid out. What is malformed is told by the whole's validation."""
    given = [key for key in ("cluster", "roles") if content.get(key) is not None]
    if len(given) == 1:
        return [f"{given[0]}: cluster and roles go together, one says what is there and the other who runs on it; add {'roles' if given == ['cluster'] else 'cluster'}"]
    if not given:
        return []
    try:
        cluster, roles = ClusterConfig.model_validate(content["cluster"]), Roles.model_validate(content["roles"])
    except ValidationError:
        return []
    return layout_mistakes(cluster, roles) or fill(content, cluster, roles)


def with_overrides(content: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A deep copy with dotted keys set: `{"learner.steps": 5}`; a number names an item of a list. Raises Mistakes where a key runs into a value."""
    result: dict[str, Any] = deepcopy(content)
    for dotted, value in overrides.items():
        *path, last = dotted.split(".")
        here: Any = result
        for before, part in zip(["the file", *path], path, strict=False):
            here = here.setdefault(part, {}) if isinstance(here, dict) else here[_item(dotted, before, part, here)]
            if not isinstance(here, dict | list):
                raise Mistakes([f"{dotted}: {part} is {here!r} and has nothing below it; correct the key"])
        here[last if isinstance(here, dict) else _item(dotted, path[-1], last, here)] = value
    return result


def _item(dotted: str, name: str, part: str, items: list[Any]) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise Mistakes([f"{dotted}: {name} is a list of {len(items)} and has no {part!r}; name an item by its number from 0, or give the list as a whole"])
    return int(part)


def _share(content: dict[str, Any]) -> list[str]:
    """Copies run_dir, model and security into the sections; says where a section names another one, or a learner."""
    lines = []
    rollout = content.get("rollout")
    if isinstance(rollout, dict) and rollout.get("learner"):
        lines.append(f"rollout.learner={rollout['learner']!r}: replicas of a run file attend the learner of that file; remove rollout.learner")
    lines += [
        f"{name}.security: every service of a run has the same; move it to the top of the file"
        for name in ("learner", "rollout", "reward")
        if isinstance(content.get(name), dict) and "security" in content[name] and "security" not in content
    ]
    for key, sections in (("run_dir", ("learner",)), ("model", ("learner", "rollout")), ("security", ("learner", "rollout", "reward"))):
        for name in sections:
            section = content.get(name)
            if not isinstance(section, dict) or key not in content:
                continue
            if section.setdefault(key, content[key]) != content[key]:
                lines.append(f"{name}.{key}={section[key]!r} differs from {key}={content[key]!r}: one run has one {key}; remove {name}.{key}")
    return lines
