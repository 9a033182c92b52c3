"""A user's own function by name, `module:function`, from anywhere on the import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def load_function(name: str, *, key: str) -> Callable[..., Any]:
    """The function that configuration key `key` names. Raises ValueError saying what is wrong and what was looked for."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{key}={name}: module {module_name} cannot be imported ({error}); start where it lies, or put its folder on PYTHONPATH") from error
    except Exception as error:  # a module of a user's may raise what it likes
        raise ValueError(f"{key}={name}: module {module_name} raised at import: {type(error).__name__}: {error}; mend it") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ValueError(f"{key}={name}: {module.__file__} has no function {attribute}; it has {', '.join(sorted(n for n in vars(module) if not n.startswith('_'))[:20])}")
    return found  # type: ignore[no-any-return]
