"""The answers of the simulated model to requests for a form. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headrace_common.errors import InvalidRequest
from headrace_engine.interface import StructuredOutputs

_LEVELS_MAX = 16


@lru_cache(maxsize=256)
def forced_answer(outputs: StructuredOutputs) -> tuple[int, ...]:
    """The tokens of the only answer that the model gives: the first choice, or a JSON value that matches the schema.

    Raises InvalidRequest for forms that it cannot make.
    """
    if outputs.kind == "choice":
        text = outputs.choices[0]
    elif outputs.kind == "json_object":
        text = "{}"
    elif outputs.kind == "json":
        text = json.dumps(_example(json.loads(outputs.text)), ensure_ascii=False)
    else:
        raise InvalidRequest(
            {
                f"sampling.structured_outputs.{outputs.kind}": "the simulated engine has json, json_object and choice "
                "only; use one of them, or the vLLM engine"
            }
        )
    return tuple(text.encode())


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
        return [item] * int(schema.get("minItems", 1))
    plain = {"integer": schema.get("minimum", 3), "number": schema.get("minimum", 0.5)}
    return {**plain, "boolean": True, "null": None}.get(kind, "sim")
