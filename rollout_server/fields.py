"""A record's fields as plain values: protobuf's Struct knows floats only, so whole numbers become integers again."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format, struct_pb2


def plain(fields: struct_pb2.Struct) -> dict[str, Any]:
    """Example: a Struct of {"answer": 12.0, "easy": true} gives {"answer": 12, "easy": True}."""
    return {name: _whole(value) for name, value in json_format.MessageToDict(fields).items()}


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value
