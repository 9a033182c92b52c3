"""A user's mistakes as lines: each names where, which value, which rule, and the way out."""

from __future__ import annotations

from pydantic import ValidationError


class Mistakes(ValueError):
    """One or more mistakes, a line each.

    Example: `Mistakes(["run.yaml: steps: Input should be greater than or equal to 1, got 0"])`
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def of_validation(error: ValidationError, where: str) -> Mistakes:
    """A line for each of pydantic's errors, `where` in front (a file's name, or "" for flags)."""
    return Mistakes([_line(item, where) for item in error.errors()])


def _line(item: object, where: str) -> str:
    assert isinstance(item, dict)
    key = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = f"unknown key (value {_short(item['input'])}): remove it or correct its spelling"
    elif item["type"] == "missing":
        message = "required, but missing: add it"
    elif item["type"] != "value_error":
        message = f"{message}, got {_short(item['input'])}"
    return ": ".join(part for part in (where, key, message) if part)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
