"""From a configured scorer to the function that is called. Imports user code: only ever used in a scorer process."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from protos.mistakes import names_in
from reward_server import scorers
from reward_server.batched import Batched, is_batch
from reward_server.outcome import clean

ENTRY_POINTS = "headrace.scorers"
ScoreFunction = Callable[[str, Any, dict[str, Any]], Any]  # of prompt, completion (of a scorer of groups: a list of them), fields
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)  # "1" is no number, and 1 no truth value


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A scorer ready to be called.

    Example: `load("last_number", {"field": "gold"}).call("1 + 1?", "It is 2.", {"gold": 2})` gives 1.0.
    """

    call: ScoreFunction  # (prompt, completion, fields); its arguments are bound
    is_async: bool
    description: str  # first line of its documentation; may be empty
    version: str  # digest of the file that it is defined in; empty: there is none
    is_deterministic: bool  # False: it says of itself, `function.is_deterministic = False`, that the same item may score differently


def load(use: str, args: dict[str, Any], *, loads_models: bool = True) -> Loaded:
    """A built-in by name, an entry point of an installed package, or "module:function" with the module importable from the current folder.

    loads_models: False: a scorer that holds a model is not proved by loading it; such a function cannot be called.
    Raises ValueError in one line: what is wrong, and what would be right.
    """
    function, check = _user_function(use) if ":" in use else _built_in(use)
    _check_arguments(use, function, args)
    if use in scorers.NAMES:
        args = _of_declared_types(use, function, args)
    if check is not None and (loads_models or use not in scorers.OWN_PROCESS):
        check(**args)
    call: Callable[..., Any] = partial(function, **args)
    return Loaded(
        call=Batched(call) if is_batch(function) else call,
        is_async=is_batch(function) or _is_async(function),
        description=_first_line(function),
        version=_version(function),
        is_deterministic=bool(getattr(function, "is_deterministic", True)),
    )


def _built_in(name: str) -> tuple[Callable[..., Any], Callable[..., None] | None]:
    if name not in scorers.NAMES:
        if found := _entry_point(name):
            return _user_function(found)
        raise ValueError(unknown(name))
    module = importlib.import_module(f"reward_server.scorers.{name}")
    return module.score, getattr(module, "check", None)


def unknown(name: str) -> str:
    """What is wrong with a scorer's name that is no "module:function"; empty: it is a built-in, or an installed package's."""
    if name in scorers.NAMES or name in _entry_points():
        return ""
    near = difflib.get_close_matches(name, [*scorers.NAMES, *_entry_points()], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f'{name!r} is no built-in scorer{hint} Known: {", ".join([*scorers.NAMES, *_entry_points()])}; a function of yours is "module:function"'


def _entry_points() -> dict[str, set[str]]:
    """What installed packages offer: "module:function" by name. One name may be offered by several packages."""
    offered: dict[str, set[str]] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        offered.setdefault(point.name, set()).add(point.value)
    return offered


def _entry_point(name: str) -> str | None:
    """The "module:function" that an installed package offers under a name. Raises ValueError where several offer different ones."""
    values = sorted(_entry_points().get(name, ()))
    if len(values) > 1:
        raise ValueError(f"several installed packages offer a scorer {name!r}: {', '.join(values)}; name one of these as use")
    return values[0] if values else None


def _user_function(use: str) -> tuple[Callable[..., Any], None]:
    module_name, _, path = use.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module_name) or not re.fullmatch(r"\w+(\.\w+)*", path):
        raise ValueError(f'{use!r} is not of the form "module:function"')
    module = _import(module_name)
    try:
        function = reduce(getattr, path.split("."), module)
    except AttributeError:
        raise ValueError(f"module {module_name!r} ({getattr(module, '__file__', None)}) has no {path!r}; it has {names_in(module) or 'no function'}") from None
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
    return clean((inspect.getdoc(function) or "").partition("\n")[0])


def _version(function: Callable[..., Any]) -> str:
    """Changes with the code, so that scores kept by another version are not taken for its own. Modules that it imports are not looked at."""
    module = sys.modules.get(getattr(function, "__module__", "") or type(function).__module__)
    file = getattr(module, "__file__", None)
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest() if file and Path(file).is_file() else ""
