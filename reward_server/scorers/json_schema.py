"""json_schema: the completion is JSON that a schema accepts (package jsonschema, MIT)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NoReturn

from reward_server import extras
from reward_server.outcome import Unscored
from reward_server.scorers.blocks import last_block

Extract = Literal["raw", "last_block"]
MAX_ERRORS = 64
MAX_CHARS = 1 << 20  # of the document; a longer one is wrong


def score(
    prompt: str,
    completion: str,
    fields: Mapping[str, Any],
    *,
    schema: dict[str, Any] | bool | None = None,
    field: str = "",
    extract: Extract = "raw",
) -> tuple[float, dict[str, float]] | Unscored:
    """1 when the completion is JSON that the schema (draft 2020-12 unless `$schema` names another) accepts, else 0.

    Example: schema `{type: object, required: [city], properties: {city: {type: string}}}`, completion `{"city": "Rome"}`: 1.
    Parts: valid_json, and num_errors (at most 64 are counted). With `field` the record's field holds the schema.
    Source: JSON Schema, draft 2020-12 (json-schema.org). Limits: references outside the schema are refused, NaN and
    Infinity are no JSON, and a document of more than 1,048,576 characters or nested too deeply to be read is wrong.
    """
    validator = _validator(json.dumps(schema)) if not field else _of_record(fields, field)
    if isinstance(validator, Unscored):
        return validator
    text = completion if extract == "raw" else last_block(completion, ("", "json"))
    try:
        document = json.loads(text, parse_constant=_no_json) if len(text) <= MAX_CHARS else _no_json("")
    except (ValueError, RecursionError):
        return 0.0, {"valid_json": 0.0}
    try:
        num_errors = len(list(islice(validator.iter_errors(document), MAX_ERRORS)))
    except RecursionError:  # nested too deeply to be looked at
        num_errors = 1
    return float(num_errors == 0), {"valid_json": 1.0, "num_errors": float(num_errors)}


def check(*, schema: dict[str, Any] | bool | None = None, field: str = "", extract: Extract = "raw") -> None:
    """Raises ValueError without the package, for neither or both of schema and field, and for what is no schema."""
    extras.need("jsonschema", scorer="json_schema", extra="reward")
    if (schema is None) == (not field):
        raise ValueError(f"give exactly one of schema (the schema itself) and field (the record's field that holds it), got schema={schema!r:.100}, field={field!r}")
    if schema is not None:
        try:
            _validator(json.dumps(schema))
        except ValueError as error:
            raise ValueError(f"schema: {error}") from None


def _of_record(fields: Mapping[str, Any], field: str) -> Any:
    if field not in fields:
        return Unscored(f"the record has no field {field!r}, only {sorted(fields)}")
    try:
        given = fields[field]
        return _validator(given if isinstance(given, str) else json.dumps(given))
    except (ValueError, RecursionError) as error:
        return Unscored(f"field {field!r} holds no schema: {error}", "bad_reference")


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    """A validator of the schema written in JSON. Raises ValueError for what is no schema, or refers outside itself."""
    import jsonschema
    import referencing

    schema = json.loads(text)
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a schema is a mapping or a truth value, not {type(schema).__name__}")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)  # type: ignore[arg-type]  # true and false are schemas, too
    except jsonschema.SchemaError as error:
        raise ValueError(f"{'.'.join(map(str, error.path)) or 'it'}: {error.message:.300}") from None
    outside = [ref for ref in _references(schema) if not ref.startswith("#")]
    if outside:
        raise ValueError(f"it refers to {outside[0]!r}; only references into itself (#/...) are followed, nothing is fetched")
    return kind(schema, registry=referencing.Registry())


def _references(part: Any) -> list[str]:
    """Every $ref and $dynamicRef in a schema."""
    found: list[str] = []
    waiting = [part]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            found += [value for key, value in each.items() if key in ("$ref", "$dynamicRef") and isinstance(value, str)]
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return found


def _no_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
