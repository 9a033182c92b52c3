"""Packages that only some scorers need: asked for at load, with the line that installs them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def need(module: str, *, scorer: str, extra: str) -> ModuleType:
    """The module. Raises ValueError with the pip line when it, or something that it needs, is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f'the scorer {scorer} needs {module}, which cannot be imported ({error}); install it: pip install ".[{extra}]" in a clone of headrace') from None


def installed(module: str, *, scorer: str, extra: str) -> None:
    """As `need`, without importing a heavy module into this process."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f'the scorer {scorer} needs {module}, which is not installed; install it: pip install ".[{extra}]" in a clone of headrace')
