"""What engines compile to constrain answers. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

SchemaPath: TypeAlias = tuple[str | int, ...]

# Keywords of JSON Schema with a schema for each of several names, with several schemas, and with one.
SCHEMA_MAPPINGS: Final = frozenset(
    {
        *("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties"),
        "properties",
    }
)
_LISTS: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
SINGLE_SCHEMAS: Final = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if"),
        *("items", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    }
)


def with_parts(
    schema: Mapping[str, Any], change: Callable[[Any, SchemaPath], Any], path: SchemaPath = ()
) -> dict[str, Any]:
    """The JSON Schema at `path`, in which `change` of each direct part and its path replaces the part."""

    def changed(name: str, value: Any) -> Any:
        place = (*path, name)
        if name in SCHEMA_MAPPINGS and isinstance(value, dict):
            return {key: change(part, (*place, key)) for key, part in value.items()}
        if name in _LISTS and isinstance(value, list):
            return [change(part, (*place, index)) for index, part in enumerate(value)]
        return change(value, place) if name in SINGLE_SCHEMAS else value

    return {name: changed(name, value) for name, value in schema.items()}


def closed_schema(text: str) -> str:
    """The JSON Schema, where objects have no other properties than those named, unless it permits others.

    A model could add properties until its answer is cut. A schema that `extends` others stays as it is.
    """
    schema = json.loads(text)
    return text if extends(schema) else json.dumps(_closed(schema))


def extends(schema: Any) -> bool:
    """Whether a part of it describes an object that has the properties of others too: by allOf, or beside a $ref."""
    if not isinstance(schema, dict):
        return False
    parts: list[Any] = []
    with_parts(schema, lambda part, _: parts.append(part))
    return "allOf" in schema or {"$ref", "properties"} <= schema.keys() or any(map(extends, parts))


def call_or_form(
    opening: str, token_id: int | None, names: Iterable[str], form: str | Iterable[str]
) -> str:
    """A grammar, in Lark's notation, of answers that are tool calls, or have a form: a schema or one of some texts.

    Calls begin with `opening`, in which NAME stands for the name of a tool, or with the token `token_id`. No grammar
    constrains the rest of them, as without a form. Without an opening, the answer is one call as JSON.
    """
    tag, named, end = opening.partition("NAME")
    # Parts that other alternatives have too are lexemes of their own.
    calls = [
        " ".join(map(json.dumps, filter(None, (tag, name + end))))
        for name in (dict.fromkeys(names) if named else ("",))
    ]
    if token_id is not None:
        calls.append(f"<[{token_id}]>")
    call = f"({' | '.join(calls)}) (<[*]>)*"
    if not opening:
        properties = {"name": {"enum": list(names)}, "parameters": {"type": "object"}}
        call = _json({"type": "object", "properties": properties, "required": list(properties)})
    shape = _json(json.loads(form)) if isinstance(form, str) else " | ".join(map(json.dumps, form))
    return f"start: form | call\nform: {shape}\ncall: {call}\n"


def _json(schema: dict[str, Any]) -> str:
    text = closed_schema(json.dumps(schema | {"x-guidance": {"whitespace_flexible": True}}))
    return f"%json {text}"


def _closed(schema: Any, _: SchemaPath = ()) -> Any:
    if not isinstance(schema, dict):
        return schema
    named = isinstance(schema.get("properties"), dict)
    alternatives = (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
    if named and any(isinstance(one, dict) and "properties" in one for one in alternatives):
        # As with allOf.
        return schema
    closed = with_parts(schema, _closed)
    return {"additionalProperties": False, **closed} if named else closed
