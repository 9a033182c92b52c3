"""A user's mistakes as lines: each names where, which value, which rule, and the way out."""

from __future__ import annotations

from pydantic import ValidationError

from protos import mistakes


class Mistakes(ValueError):
    """One or more mistakes, a line each.

    Example: `Mistakes(["run.yaml: steps: Input should be greater than or equal to 1, got 0"])`
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def of_validation(error: ValidationError, where: str) -> Mistakes:
    """A line for each of pydantic's errors, `where` in front (a file's name, or "" for flags)."""
    return Mistakes(mistakes.of_validation(error.errors(), where))
