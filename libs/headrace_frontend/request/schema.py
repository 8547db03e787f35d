"""The JSON Schemas that answers must match. Pure."""

from __future__ import annotations

from typing import Any, Final

from headrace_common.limits import SCHEMA_BYTES_MAX
from headrace_frontend.request.json_text import JsonRejected, parse_object

_SHOWN_CHARACTERS = 200
# Keywords with values that are no schemas, and those with a schema for each of several names.
_LITERALS: Final = frozenset({"const", "default", "enum", "examples"})
_MAPPINGS: Final = frozenset(
    {"$defs", "definitions", "properties", "patternProperties", "dependentSchemas"}
)


def schema_problem(text: str) -> str | None:
    """The remedy for a text that is not a JSON Schema. None for a schema.

    A schema without a known $schema is one of draft 2020-12. No reference is fetched.
    """
    # Few requests have a schema, and the import takes a tenth of a second.
    from jsonschema import Draft202012Validator, FormatChecker, SchemaError
    from jsonschema.validators import validator_for

    try:
        schema = parse_object(text, SCHEMA_BYTES_MAX)
    except JsonRejected as error:
        return str(error)
    if not isinstance(schema.get("$schema", ""), str):
        return "is not a JSON Schema: $schema must be a string; leave it out"
    # Regular expressions are ECMAScript's, which Python cannot check.
    unchecked = FormatChecker(formats=())
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema, unchecked)
    except SchemaError as error:
        place = "".join(f"[{part!r}]" for part in error.absolute_path) or "its top"
        return f"is not a JSON Schema: {error.message[:_SHOWN_CHARACTERS]}, at {place}; correct it"
    return None


def moved_schema(schema: Any, place: str, *, is_mapping: bool = False) -> Any:
    """The schema with references that are right where `place`, such as "#/$defs/x", is its top."""
    if isinstance(schema, list):
        return [moved_schema(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for name, value in schema.items():
        if is_mapping:
            moved[name] = moved_schema(value, place)
        elif name == "$ref" and isinstance(value, str) and (value == "#" or value[:2] == "#/"):
            moved[name] = place + value[1:]
        elif name in _LITERALS:
            moved[name] = value
        else:
            moved[name] = moved_schema(value, place, is_mapping=name in _MAPPINGS)
    return moved
