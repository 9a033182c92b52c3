"""A record's fields, from the wire's Struct to plain Python. Pure."""

from __future__ import annotations

from typing import Any

from google.protobuf.struct_pb2 import ListValue, Struct, Value

Plain = None | bool | int | float | str | list[Any] | dict[str, Any]

_EXACT = 2.0**53  # below, every integral float is exactly one integer


def decode(data: bytes) -> dict[str, Plain]:
    """Fields of a serialized Struct. Integral numbers below 2**53 become int again: a Struct only holds floats.

    Raises google.protobuf.message.DecodeError for other bytes.
    """
    return _struct(Struct.FromString(data)) if data else {}


def _struct(struct: Struct) -> dict[str, Plain]:
    return {name: _value(value) for name, value in struct.fields.items()}


def _list(values: ListValue) -> list[Plain]:
    return [_value(value) for value in values.values]


def _value(value: Value) -> Plain:
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        return value.string_value
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() and abs(number) < _EXACT else number
    if kind == "bool_value":
        return value.bool_value
    if kind == "struct_value":
        return _struct(value.struct_value)
    if kind == "list_value":
        return _list(value.list_value)
    return None
