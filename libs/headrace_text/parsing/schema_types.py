"""Converts the text of an argument to the type that a tool's JSON Schema gives it. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

_KINDS: Final[Mapping[type, str]] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_CHOICES: Final = ("anyOf", "oneOf", "allOf")
_NESTED_MAX: Final = 16
# What models write for them, also in Python.
_WORDS: Final = {"true": True, "false": False, "none": None, "null": None}


def converted(text: str, schema: Any, root: Any) -> Any:
    """The value of an argument with this schema. `root` has what its references name.

    A text that may be a string stays one, unless the schema has another type that it matches too. The types of a
    schema without any are those of a string.
    """
    kinds = set(_kinds_of(schema, root, _NESTED_MAX)) or {"string"}
    value = _parsed(text)
    kind = _KINDS.get(type(value), "string")
    if kind == "integer" and "integer" not in kinds:
        kind = "number"
    if kind == "number" and kinds.isdisjoint(("number", "string")) and value == int(value):
        kind, value = "integer", int(value)
    if kind in kinds and kind != "string":
        return value
    word = text.strip().lower()
    if "null" in kinds and word == "null":
        return None
    if "boolean" in kinds and word in ("true", "false", "1", "0"):
        return word in ("true", "1")
    if "string" in kinds:
        return text
    return _WORDS.get(word, value)


def _parsed(text: str) -> Any:
    """The JSON value in `text`, or else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if _is_finite(value) else text


def _is_finite(value: Any) -> bool:
    """Whether the value can be written as JSON."""
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _kinds_of(schema: Any, root: Any, nested_max: int) -> Iterator[str]:
    if not isinstance(schema, dict) or not nested_max:
        return
    named = schema.get("type")
    yield from [named] if isinstance(named, str) else named if isinstance(named, list) else ()
    values = schema.get("enum")
    for value in values if isinstance(values, list) else ():
        yield _KINDS[type(value)]
    if "const" in schema:
        yield _KINDS[type(schema["const"])]
    if isinstance(schema.get("$ref"), str):
        yield from _kinds_of(_referenced(schema["$ref"], root), root, nested_max - 1)
    for name in _CHOICES:
        choices = schema.get(name)
        for choice in choices if isinstance(choices, list) else ():
            yield from _kinds_of(choice, root, nested_max - 1)


def _referenced(reference: str, root: Any) -> Any:
    """The schema that a reference within `root` names. None for another."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference.split("/")[1:]:
        if not isinstance(found, dict):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found
