"""From a configured scorer to the function that is called. Imports user code: only ever used in a scorer process."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from reward_server import scorers

ScoreFunction = Callable[[str, str, dict[str, Any]], Any]
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)  # "1" is no number, and 1 no truth value


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A scorer ready to be called.

    Example: `load("last_number", {"field": "gold"}).call("1 + 1?", "It is 2.", {"gold": 2})` gives 1.0.
    """

    call: ScoreFunction  # (prompt, completion, fields); its arguments are bound
    is_async: bool
    description: str  # first line of its documentation; may be empty


def load(use: str, args: dict[str, Any]) -> Loaded:
    """A built-in by name, or "module:function" with the module importable from the current folder.

    Raises ValueError in one line: what is wrong, and what would be right.
    """
    function, check = _user_function(use) if ":" in use else _built_in(use)
    _check_arguments(use, function, args)
    if ":" not in use:
        args = _of_declared_types(use, function, args)
    if check is not None:
        check(**args)
    return Loaded(call=partial(function, **args), is_async=_is_async(function), description=_first_line(function))


def _built_in(name: str) -> tuple[Callable[..., Any], Callable[..., None] | None]:
    if name not in scorers.NAMES:
        near = difflib.get_close_matches(name, scorers.NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f'{name!r} is no built-in scorer{hint} Known: {", ".join(scorers.NAMES)}; a function of yours is "module:function"')
    module = importlib.import_module(f"reward_server.scorers.{name}")
    return module.score, getattr(module, "check", None)


def _user_function(use: str) -> tuple[Callable[..., Any], None]:
    module_name, _, path = use.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module_name) or not re.fullmatch(r"\w+(\.\w+)*", path):
        raise ValueError(f'{use!r} is not of the form "module:function"')
    module = _import(module_name)
    try:
        function = reduce(getattr, path.split("."), module)
    except AttributeError:
        raise ValueError(f"module {module_name!r} ({getattr(module, '__file__', None)}) has no {path!r}") from None
    if not callable(function):
        raise ValueError(f"{use!r} is of type {type(function).__name__}, which cannot be called; name a function")
    return function, None


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(f"module {name!r} was not found; start the server in the folder that holds it, or put that folder on PYTHONPATH") from None
        raise ValueError(f"module {name!r} imports {error.name!r}, which is not installed") from None
    except BaseException as error:  # user code at import may raise anything, SystemExit too; each means the same here
        raise ValueError(f"module {name!r} raised at import: {type(error).__name__}: {error}") from error


def _check_arguments(use: str, function: Callable[..., Any], args: dict[str, Any]) -> None:
    """Raises ValueError when the call (prompt, completion, fields, **args) does not fit."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some C functions tell no signature
    try:
        signature.bind("prompt", "completion", {}, **args)
    except TypeError as error:
        raise ValueError(f"{use} takes {signature}, which does not fit (prompt, completion, fields) with args {args}: {error}") from None


def _of_declared_types(use: str, function: Callable[..., Any], args: dict[str, Any]) -> dict[str, Any]:
    """A built-in's arguments as its signature declares them, bounds in `Annotated[..., Field(...)]` included. Raises ValueError naming each mistake."""
    hints = get_type_hints(function, include_extras=True)
    typed: dict[str, Any] = {}
    mistakes: list[str] = []
    for name, value in args.items():
        try:
            typed[name] = TypeAdapter(hints[name], config=_STRICT).validate_python(value)
        except ValidationError as error:
            mistakes += [f"{'.'.join(map(str, (name, *each['loc'])))}={each['input']!r:.200}: {each['msg'][:1].lower()}{each['msg'][1:]}" for each in error.errors()]
    if mistakes:
        raise ValueError(f"{use}: {'; '.join(mistakes)}")
    return typed


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(type(function), "__call__", None))  # noqa: B004  # of an object's class, not whether it is callable


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]
