"""On which line of a YAML file a key stands, so that a mistake names it."""

from __future__ import annotations

import re

import yaml

_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")


def lines_of(text: str) -> dict[str, int]:
    """Dotted keys to line numbers, from 1; items of lists by their index. Empty for a text that is no YAML."""
    found: dict[str, int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return {}
    _walk(root, "", found)
    return found


def located(line: str, where: str, lines: dict[str, int]) -> str:
    """`run.yaml: learner.steps: ...` as `run.yaml:7: learner.steps: ...`; as it is where the file has neither that key nor one around it."""
    head = f"{where}: "
    if not line.startswith(head):
        return line
    number = _number(line.removeprefix(head), lines)
    return f"{where}:{number}: {line.removeprefix(head)}" if number else line


def _number(message: str, lines: dict[str, int]) -> int:
    """Of the key that a message begins with (`learner.steps: ...`), also where it is said in two parts (`learner: sampling.temperature=0 ...`)."""
    keys = [match[0] for match in _KEY.finditer(message[:200])][:2]
    if not keys:
        return 0
    rest = message.removeprefix(keys[0])
    candidates = [f"{keys[0]}.{keys[1]}"] if len(keys) > 1 and rest.startswith(": ") and rest[2:].startswith(keys[1]) else []
    for candidate in (*candidates, keys[0]):
        parts = candidate.split(".")
        for length in range(len(parts), 0, -1):
            key = ".".join(parts[:length])
            if key in lines and (length > 1 or len(parts) == 1 or candidate is keys[0]):
                return lines[key]
    return 0


def _walk(node: yaml.Node | None, prefix: str, found: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            found[name] = key.start_mark.line + 1
            _walk(value, f"{name}.", found)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            found[f"{prefix}{index}"] = value.start_mark.line + 1
            _walk(value, f"{prefix}{index}.", found)
