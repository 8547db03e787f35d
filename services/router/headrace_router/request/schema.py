"""Checks the JSON Schemas of clients. Pure."""

from __future__ import annotations

from headrace_common.limits import SCHEMA_BYTES_MAX
from headrace_router.request.json_text import JsonRejected, parse_object


def schema_problem(text: str) -> str | None:
    """The remedy for a text that is not a JSON Schema. None for a schema."""
    try:
        parse_object(text, SCHEMA_BYTES_MAX)
    except JsonRejected as error:
        return str(error)
    return None
