"""The JSON Schemas that answers must match. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from headrace_common.limits import SCHEMA_BYTES_MAX
from headrace_frontend.request.json_text import JsonRejected, parse_object
from headrace_text.constraints import SCHEMA_MAPPINGS, SINGLE_SCHEMAS, SchemaPath, with_parts

_SHOWN_CHARACTERS = 200
# Parts that are looked at to find out whether a schema has a finite value.
_STEPS_MAX: Final = 50_000
_TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0


def _are_names(value: Any) -> bool:
    """Whether it is a list of different texts. In linear time."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        return False
    return len(set(value)) == len(value)


def _are_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and _are_names(names) and set(names) <= set(_TYPES)


def _are_names_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_are_names, value.values()))


_Rule: TypeAlias = tuple[Callable[[Any], bool], str]
_TEXT: Final[_Rule] = (lambda value: isinstance(value, str), "give a text")
_FLAG: Final[_Rule] = (lambda value: isinstance(value, bool), "give true or false")
_MAPPING: Final[_Rule] = (lambda value: isinstance(value, dict), "give an object of schemas")
_SOME: Final[_Rule] = (lambda value: isinstance(value, list) and bool(value), "give some schemas")
_COUNT: Final[_Rule] = (_is_count, "give a count")
_NUMBER: Final[_Rule] = (_is_number, "give a number")
# Draft 4 has a flag here.
_EXCLUSIVE: Final[_Rule] = (lambda value: isinstance(value, int | float), "give a number")
_RULES: Final[Mapping[str, _Rule]] = {
    "type": (_are_types, f"give some of {', '.join(_TYPES)}"),
    "required": (_are_names, "give a list of different names"),
    "dependentRequired": (_are_names_by_name, "give lists of different names"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "give a number above 0"),
    **dict.fromkeys(("$defs", "definitions", "dependencies"), _MAPPING),
    **dict.fromkeys(("dependentSchemas", "patternProperties", "properties"), _MAPPING),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SOME),
    **dict.fromkeys(("enum", "examples"), (lambda value: isinstance(value, list), "give a list")),
    **dict.fromkeys(("maximum", "minimum"), _NUMBER),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), _EXCLUSIVE),
    **dict.fromkeys(("maxContains", "maxItems", "maxLength", "maxProperties"), _COUNT),
    **dict.fromkeys(("minContains", "minItems", "minLength", "minProperties"), _COUNT),
    **dict.fromkeys(("deprecated", "readOnly", "uniqueItems", "writeOnly"), _FLAG),
    **dict.fromkeys(("$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id"), _TEXT),
    **dict.fromkeys(("$recursiveRef", "$ref", "contentEncoding", "contentMediaType"), _TEXT),
    **dict.fromkeys(("description", "format", "pattern", "title"), _TEXT),
}


def schema_problem(text: str) -> str | None:
    """The remedy for a text that is not a JSON Schema, of any draft. None for a schema.

    It takes time in proportion to the length. No reference is fetched. Engines reject what they cannot enforce.
    """
    try:
        schema = parse_object(text, SCHEMA_BYTES_MAX)
    except JsonRejected as error:
        return str(error)
    if not isinstance(schema.get("$schema", ""), str):
        return "is not a JSON Schema: $schema must be a string; leave it out"
    problem = keyword_problem(schema)
    if problem is None and not has_finite_value(schema):
        return "has no finite value: each one contains another; make a reference optional"
    return problem


def keyword_problem(schema: dict[str, Any]) -> str | None:
    """As `schema_problem`, of the keywords alone."""
    parts: list[tuple[Any, SchemaPath]] = [(schema, ())]
    while parts:
        part, path = parts.pop()
        # Before draft 2019-09, dependencies are schemas or lists of names.
        if isinstance(part, bool) or (path[-2:-1] == ("dependencies",) and _are_names(part)):
            continue
        if not isinstance(part, dict):
            return _remedy(part, path, "give a schema")
        for name, value in part.items():
            holds, rule = _RULES.get(name, (None, ""))
            if holds is not None and not holds(value):
                return _remedy(value, (*path, name), rule)
        with_parts(part, lambda *found: parts.append(found), path)
    return None


def has_finite_value(schema: dict[str, Any]) -> bool:
    """False where each value of a valid schema would contain another of its values without end.

    True for a schema that is too large for the check.
    """
    finite: set[str] = set()
    steps = iter(range(_STEPS_MAX))

    def ends(part: Any) -> bool:
        if not isinstance(part, dict) or next(steps, None) is None:
            return part is not False
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in finite:
            return False
        if not all(map(ends, part.get("allOf", ()))):
            return False
        if not all(any(map(ends, part[name])) for name in ("anyOf", "oneOf") if name in part):
            return False
        kind = part.get("type")
        if kind == "object":
            properties = part.get("properties", {})
            return all(ends(properties.get(name)) for name in part.get("required", ()))
        if kind == "array" and isinstance(items := part.get("items"), dict):
            return part.get("minItems", 0) <= len(part.get("prefixItems", ())) or ends(items)
        return True

    parts = {place: resolved(schema, place) for place in set(_references(schema))}
    while not ends(schema):
        found = {place for place in parts.keys() - finite if ends(parts[place])}
        if not found:
            return False
        finite |= found
    return True


def resolved(root: dict[str, Any], place: str) -> Any:
    """The schema in a schema that a reference such as "#/$defs/x" refers to. None for other references."""
    found: Any = root if place == "#" or place[:2] == "#/" else None
    by_name = False
    # Whether `found` has a schema for each name.
    for key in place[2:].split("/") if place[2:] else ():
        name = unquote(key).replace("~1", "/").replace("~0", "~")
        known = isinstance(found, dict) and (by_name or name in SCHEMA_MAPPINGS | SINGLE_SCHEMAS)
        found = found.get(name) if known else None
        by_name = not by_name and name in SCHEMA_MAPPINGS
    return None if by_name or isinstance(found, list) else found


def _references(value: Any) -> Iterator[str]:
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if isinstance(place := part.get("$ref"), str):
                yield place
            part = part.values()
        elif not isinstance(part, list):
            continue
        parts.extend(part)


def _remedy(value: Any, path: SchemaPath, rule: str) -> str:
    shown = repr(value)[:_SHOWN_CHARACTERS]
    place = "".join(f"[{part!r}]" for part in path)[:_SHOWN_CHARACTERS] or "its top"
    return f"is not a JSON Schema: {shown} is not valid, at {place}; {rule}"


def moved_schema(schema: Any, place: str) -> Any:
    """The schema with references that are right where `place`, such as "#/$defs/x", is its top."""
    if not isinstance(schema, dict):
        return schema
    moved = with_parts(schema, lambda part, _: moved_schema(part, place))
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference[:2] == "#/"):
        moved["$ref"] = place + reference[1:]
    return moved
