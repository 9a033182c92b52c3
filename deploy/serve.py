"""One service alone: flags or a file become its configuration, then this process becomes the service."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from deploy.mistakes import Mistakes, of_validation
from deploy.schema import read_yaml, with_overrides
from learner.config import LearnerConfig
from protos import yaml_text
from reward_server.config import RewardConfig
from rollout_server.config import RolloutConfig
from rollout_server.environments.config import EnvironmentServerConfig

MODULES: dict[str, type[BaseModel]] = {"learner": LearnerConfig, "rollout_server": RolloutConfig, "reward_server": RewardConfig, "rollout_server.environments": EnvironmentServerConfig}


def resolve(module: str, file: Path | None, flags: dict[str, Any], sets: list[str]) -> BaseModel:
    """Configuration from a file, with flags (dotted keys; None: not given) and KEY=VALUE words on top. Raises Mistakes."""
    content = read_yaml(file) if file else {}
    given = {key: value for key, value in flags.items() if value not in (None, [], ())}
    try:
        return MODULES[module].model_validate(with_overrides(content, {**given, **parse_sets(sets)}))
    except ValidationError as error:
        raise of_validation(error, str(file) if file else "") from None


def parse_sets(words: list[str]) -> dict[str, Any]:
    """`["optimizer.lr=1e-5"]` to `{"optimizer.lr": 1e-5}`; values are YAML. Raises Mistakes."""
    pairs: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise Mistakes([f"--set {word}: must be KEY=VALUE, for instance --set optimizer.lr=1e-5"])
        pairs[key] = _value(value)
    return pairs


def _value(text: str) -> Any:
    try:
        return yaml_text.read(text)
    except yaml.YAMLError:
        return text


def parse_scorers(words: list[str]) -> list[dict[str, Any]]:
    """`["answer=last_number"]` to scorer sections. Raises Mistakes."""
    scorers = []
    for word in words:
        name, equals, use = word.partition("=")
        if not equals or not name or not use:
            raise Mistakes([f"--scorer {word}: must be NAME=USE, for instance --scorer answer=last_number or --scorer mine=my_package.rewards:score"])
        scorers.append({"name": name, "use": use})
    return scorers


def become(module: str, config: BaseModel) -> None:
    """Replaces this process by the service, so that signals and the exit code are the service's own."""
    text = json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
    name = f"headrace-{os.getuid()}-{module}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    file = Path(tempfile.gettempdir()) / name  # named by its content: starting often leaves one file
    part = file.with_suffix(f".{os.getpid()}")
    part.touch(mode=0o600)
    part.write_text(text)
    part.replace(file)
    os.execv(sys.executable, [sys.executable, "-m", module, "--config", str(file)])
