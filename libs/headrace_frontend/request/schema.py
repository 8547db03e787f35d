"""Checks the JSON Schemas that answers must match. Pure."""

from __future__ import annotations

from headrace_common.limits import SCHEMA_BYTES_MAX
from headrace_frontend.request.json_text import JsonRejected, parse_object

_SHOWN_CHARACTERS = 200


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
