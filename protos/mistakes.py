"""How every process tells its user of a mistake: one line each, `headrace: ...`, and exit code 2. Launchers read these lines.

A line names the file, the key, its value, the rule, and the way out. Imports nothing, so that a command line starts fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

EXIT_CODE = 2
PREFIX = "headrace: "


def of_validation(errors: Iterable[Mapping[str, Any]], where: str) -> list[str]:
    """A line for each of pydantic's `ValidationError.errors()`, `where` (a file's name, or "") in front."""
    found = list(errors)
    return [_line(error, where) for error in found if not _follows(error, found)]


def _follows(error: Mapping[str, Any], among: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a list is too short only because items of it are wrong, which have lines of their own."""
    place = tuple(error["loc"])
    return error["type"] == "too_short" and any(len(each["loc"]) > len(place) and tuple(each["loc"])[: len(place)] == place for each in among)


def one_line(error: object) -> str:
    """The text of an error of some library without its line breaks."""
    return " ".join(str(error).replace(' in "<unicode string>",', " in").split())


def names_in(module: ModuleType) -> str:
    """The classes and functions that a module makes itself, the first twelve; empty: it makes none."""
    found = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__)
    return ", ".join(found[:12])


def check_address(key: str, address: str, *, may_be_free: bool = False) -> tuple[str, int]:
    """Host and port of `host:port`. may_be_free: port 0 takes a free one.

    Raises ValueError naming key, value and rule. gRPC itself takes port 99999 for 34463 and a host without a port for port 443.
    """
    host, colon, port = address.rpartition(":")
    first = 0 if may_be_free else 1
    if not colon or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{key}={address!r} must be host:port, for instance 127.0.0.1:7430")
    if not first <= int(port) <= 65535:
        raise ValueError(f"{key}={address!r}: port {port} lies outside {first} to 65535; choose one that does not{', or 0 for a free one' if may_be_free else ''}")
    return host, int(port)


def _line(error: Mapping[str, Any], where: str) -> str:
    key = ".".join(str(part) for part in error["loc"])
    message, kind = str(error["msg"]).removeprefix("Value error, "), error["type"]
    if kind == "extra_forbidden":
        message = f"unknown key (value {_short(error['input'])}): remove it or correct its spelling"
    elif kind == "missing":
        message = "required, but missing: add it"
    elif kind != "value_error":
        message = f"{message}, got {_short(error['input'])}; correct it"
    return ": ".join(part for part in (where, key, message) if part)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
