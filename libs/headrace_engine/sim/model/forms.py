"""The texts that the simulated model can write where a request asks for a form. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headrace_engine.interface import StructuredOutputs

SUPPORTED_FORMS = ("choice", "json", "json_object")
_LEVELS_MAX = 16
_ITEMS_MAX = 16


@lru_cache(maxsize=256)
def texts_of_form(outputs: StructuredOutputs) -> tuple[str, ...]:
    """The choices, or for JSON one value that matches the schema. `outputs` must be one of SUPPORTED_FORMS.

    It knows the words of JSON Schema that tools and typed answers use, and no others.
    """
    if outputs.kind == "choice":
        return outputs.choices
    value = {} if outputs.kind == "json_object" else _example(json.loads(outputs.text))
    return (json.dumps(value, ensure_ascii=False),)


def _example(schema: Any, definitions: Mapping[str, Any] | None = None, level: int = 0) -> Any:
    if not isinstance(schema, dict) or level > _LEVELS_MAX:
        return None
    definitions = schema.get("$defs") or definitions or {}
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        return _example(definitions.get(name), definitions, level + 1)
    if "const" in schema:
        return schema["const"]
    for word in ("enum", "anyOf", "oneOf", "allOf"):
        if schema.get(word):
            first = schema[word][0]
            return first if word == "enum" else _example(first, definitions, level + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties") or {}
        return {name: _example(one, definitions, level + 1) for name, one in properties.items()}
    if kind == "array":
        item = _example(schema.get("items") or {}, definitions, level + 1)
        return [item] * min(_ITEMS_MAX, int(schema.get("minItems", 1)))
    plain = {"integer": schema.get("minimum", 3), "number": schema.get("minimum", 0.5)}
    return {**plain, "boolean": True, "null": None}.get(kind, "sim")
