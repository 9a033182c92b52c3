"""YAML as configurations are written in: plain values only, and a key that stands twice in a mapping is a mistake.

PyYAML takes the last of two equal keys in silence, so that a section written twice loses its first half. And it speaks YAML 1.1, where the key `off` of
`security: {off: [tls]}` is the boolean False and `1e-5` is a word: here words and numbers are those of YAML 1.2's core schema.
"""

from __future__ import annotations

import re
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


_OWN = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
_OnceOnly.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OWN] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.2.2, section 10.3.2
_OnceOnly.add_implicit_resolver(_OWN[0], re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_OnceOnly.add_implicit_resolver(
    _OWN[1],
    re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+0123456789."),
)
