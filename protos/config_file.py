"""A service's configuration file, read and checked: the same words for the same mistake, whichever service it is."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from protos import mistakes, yaml_text

Config = TypeVar("Config", bound=BaseModel)


def read(path: Path, model: type[Config], *, example: str = "deploy/templates has examples") -> Config:
    """What a YAML or JSON file says. Raises ValueError with one line for each mistake: file, key, value, rule, way out."""
    try:
        values = yaml_text.read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is neither YAML nor JSON: {mistakes.one_line(error)}; correct that place, or give another file") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of keys, it holds {type(values).__name__}; {example}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ValueError("\n".join(mistakes.of_validation(error.errors(), str(path)))) from None
