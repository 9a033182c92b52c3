"""YAML as configurations are written in: plain values only, and a key that stands twice in a mapping is a mistake.

YAML's own reader takes the last of two equal keys in silence, so that a section written twice loses its first half.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


def read(text: str) -> Any:
    """The value of one YAML (or JSON) document. Raises yaml.YAMLError, for a key that stands twice too, naming it and the line."""
    return yaml.load(text, Loader=_OnceOnly)


class _OnceOnly(yaml.SafeLoader):
    """Example: `{a: 1, a: 2}` is refused; a key that `<<` brought in may be written again."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True) if key_node.tag != _MERGE else None
            if key is not None and isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice in one mapping", key_node.start_mark)
            seen |= {key} if key is not None and isinstance(key, Hashable) else set()
        return super().construct_mapping(node, deep)
