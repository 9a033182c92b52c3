"""format: the completion has the asked sections, each once and in order, between tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"[A-Za-z_][\w.-]*")


def score(
    prompt: str,
    completion: str,
    fields: Mapping[str, Any],
    *,
    sections: list[str] = ["think", "answer"],  # noqa: B006 - read only
    opened: bool = False,
    outside: bool = False,
    may_be_empty: bool = False,
    partial: bool = False,
) -> tuple[float, dict[str, float]]:
    """1 when every section stands exactly once as <name>...</name>, in this order and not inside another, else 0.

    Example: `<think>2 + 2</think> <answer>4</answer>`: 1; with a second `<answer>` anywhere: 0.
    opened: the prompt's template wrote the first opening tag. outside: text before, between and after sections is allowed.
    may_be_empty: sections may hold nothing but space. partial: the share of the conditions met (one for each tag that stands
    exactly once; order; nothing outside; nothing empty) instead of all or nothing.
    Source: the format reward of DeepSeek-R1 (DeepSeek-AI 2025, section 2.2.2). Limits: tags carry no attributes and are told by case.
    """
    text = f"<{sections[0]}>{completion}" if opened else completion
    tags = [tag for name in sections for tag in (f"<{name}>", f"</{name}>")]
    once = [text.count(tag) == 1 for tag in tags]
    parts = {"tags": sum(once) / len(tags), "order": 0.0, "nothing_outside": 0.0, "nothing_empty": 0.0}
    if all(once):
        places = [text.index(tag) for tag in tags]
        if places == sorted(places):
            ends = [place + len(tag) for place, tag in zip(places, tags, strict=True)]
            between = [text[: places[0]], *[text[ends[i] : places[i + 1]] for i in range(1, len(tags) - 1, 2)], text[ends[-1] :]]
            inside = [text[ends[i] : places[i + 1]] for i in range(0, len(tags), 2)]
            parts["order"] = 1.0
            parts["nothing_outside"] = float(outside or not any(each.strip() for each in between))
            parts["nothing_empty"] = float(may_be_empty or all(each.strip() for each in inside))
    met = sum(once) + parts["order"] + parts["nothing_outside"] + parts["nothing_empty"]
    share = met / (len(tags) + 3)
    return (share if partial else float(share == 1.0)), parts


def check(
    *, sections: list[str] = ["think", "answer"], opened: bool = False, outside: bool = False, may_be_empty: bool = False, partial: bool = False  # noqa: B006 - read only
) -> None:
    """Raises ValueError for no sections, one twice, or a name that is no tag's."""
    if not sections or len(set(sections)) != len(sections) or not all(_NAME.fullmatch(name) for name in sections):
        raise ValueError(f'sections={sections} must be one or more different tag names without brackets, for instance ["think", "answer"]')
