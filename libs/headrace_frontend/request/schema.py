"""The JSON Schemas that answers must match: whether they are valid, and what engines can enforce of them. Pure.

What they cannot enforce is rewritten, dropped where it says nothing, or named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from headrace_common.limits import SCHEMA_BYTES_MAX
from headrace_frontend.request.json_text import JsonRejected, exceeds_levels, parse_object
from headrace_text.constraints import (
    SCHEMA_MAPPINGS,
    SINGLE_SCHEMAS,
    SchemaPath,
    extends,
    with_parts,
)

_Schema: TypeAlias = dict[str, Any]

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


_text = partial(json.dumps, ensure_ascii=False)

# Of alternatives in one schema, and of values in each. More are not compared.
_PAIRS_MAX, _VALUES_MAX = 4_096, 16
_ANNOTATIONS: Final = frozenset({"title", "description", "examples", "default", "type"})
# Keywords that evaluate properties and items too.
_COMPOSITIONS: Final = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
_FORMATS: Final = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown"),
        *("uri", "uuid"),
    }
)
_URI: Final = r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2}"
_FORMAT_PATTERNS: Final[Mapping[str, str]] = {
    "json-pointer": "^(/([^/~]|~[01])*)*$",
    "uri-reference": f"^({_URI})*$",
    "uri-template": rf"^({_URI}|\{{[+#./;?&=,!@|]?[A-Za-z0-9_.%,:*]+\}})*$",
}
# A class that has no end reaches to the end of the pattern, so that the time is linear.
_PATTERN_PART: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+\]?|\(\?<?[=!]|.", re.DOTALL)


def enforceable(schema: _Schema) -> tuple[_Schema, list[str]]:
    """What engines enforce of a schema, and the paths of keywords that it lacks, such as "properties.a.contains".

    An invalid schema stays as it is, and one beyond the bounds. `schema_problem` reports it.
    """
    if exceeds_levels(schema) or len(_text(schema)) > SCHEMA_BYTES_MAX or keyword_problem(schema):
        return schema, []
    rewriting = _Rewriting(schema)
    rewritten = rewriting.rewritten(schema)
    # No value matches what is not an object here.
    return rewritten if isinstance(rewritten, dict) else {"enum": []}, rewriting.unenforced


def without_lookarounds(pattern: str) -> str | None:
    """A pattern that matches more: without conditions on the text around a place. None with back-references."""
    kept: list[str] = []
    # Whether each open group is such a condition, and how many are.
    groups, conditions = list[bool](), 0
    for match in _PATTERN_PART.finditer(pattern):
        part = match[0]
        if part[0] == "\\" and part[1:] in "123456789k":
            return None
        if part[0] == "(":
            groups.append(len(part) > 1)
            conditions += groups[-1]
        if not conditions and part not in (r"\b", r"\B"):
            kept.append(part)
        if part == ")" and groups:
            conditions -= groups.pop()
    return "".join(kept)


class _Rewriting:
    """Rewrites the parts of one schema, from the innermost."""

    def __init__(self, root: _Schema) -> None:
        self.unenforced: list[str] = []
        self._root = root
        self._opens = extends(root)
        self._pairs = iter(range(_PAIRS_MAX))
        self._known: dict[int, tuple[Any, set[str]]] = {}
        """The values of a schema, by its id, with the schema: no other one may get its id."""

    def rewritten(self, schema: Any, path: SchemaPath = ()) -> Any:
        """The schema at a path, with its parts rewritten."""
        if not isinstance(schema, dict):
            return schema
        if _says_nothing(schema.get("not")):
            return False
        found = with_parts(schema, self.rewritten, path)
        for name in schema:
            if not self._apply(name, schema, found):
                self.unenforced.append(".".join(map(str, (*path, name))))
        return found

    def _apply(self, name: str, given: _Schema, found: _Schema) -> bool:
        """Removes or replaces a keyword that no engine enforces. False when the schema then permits more."""
        if name in _DROPPED:
            return _DROPPED[name](found.pop(name), given)
        if name in _RENAMED:
            found.setdefault(_RENAMED[name], found.pop(name))
        match name:
            case "format":
                _write_format(found)
            case "oneOf":
                return self._permit_any(found)
            case "pattern":
                return _write_pattern(found)
            case "propertyNames":
                return _name_properties(found, self._resolved(found.pop(name)))
            case "unevaluatedItems":
                return _close(found, name, "items")
            case "unevaluatedProperties":
                return _close(found, name, "additionalProperties")
        return True

    def _permit_any(self, schema: _Schema) -> bool:
        """Replaces oneOf by anyOf, unless no value can match two of the alternatives."""
        if "anyOf" in schema:
            return True
        parts = map(self._resolved, schema["oneOf"])
        # See closed_schema.
        opens = self._opens or "properties" in schema
        if all(
            next(self._pairs, None) is not None and _are_disjoint(*pair, self._values, opens=opens)
            for pair in combinations(parts, 2)
        ):
            return True
        schema["anyOf"] = schema.pop("oneOf")
        return False

    def _values(self, schema: Any) -> set[str]:
        known = self._known.get(id(schema))
        if known is None:
            known = self._known[id(schema)] = (schema, _values(schema))
        return known[1]

    def _resolved(self, schema: Any) -> Any:
        """What a reference to the schema's own definitions refers to, or else the schema."""
        place = schema.get("$ref") if isinstance(schema, dict) else None
        found = resolved(self._root, place) if place is not None else None
        return schema if found is None else found


def _are_disjoint(
    one: Any, other: Any, values_of: Callable[[Any], set[str]], *, opens: bool
) -> bool:
    """Whether a simple rule shows that no value matches both schemas. `opens`: objects have any other properties."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    kinds, others = _kinds(one), _kinds(other)
    if kinds and others and not kinds & others:
        return True
    if values := values_of(one):
        return bool(found := values_of(other)) and not values & found
    if kinds != {"object"} or others != {"object"}:
        return False
    properties, more = one.get("properties"), other.get("properties")
    if not isinstance(properties, dict) or not isinstance(more, dict):
        return False
    needed, needed_more = set(one.get("required", ())), set(other.get("required", ()))
    # Objects have only the properties that their schema names, unless it says otherwise.
    if other.get("additionalProperties", opens) is False and needed - more.keys():
        return True
    if one.get("additionalProperties", opens) is False and needed_more - properties.keys():
        return True
    return any(
        (values := values_of(properties.get(name)))
        and (found := values_of(more.get(name)))
        and not values & found
        for name in needed & needed_more
    )


def _kinds(schema: _Schema) -> set[str]:
    kinds = schema.get("type", ())
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    return found | {"integer"} if "number" in found else found


def _values(schema: Any) -> set[str]:
    """The only values that match, as JSON. Empty for many."""
    given = schema if isinstance(schema, dict) else {}
    values: Any = [given["const"]] if "const" in given else given.get("enum")
    few = isinstance(values, list) and len(values) <= _VALUES_MAX
    return set(map(json.dumps, values)) if few else set()


def _says_nothing(schema: Any) -> bool:
    return schema is True or schema == {}


def _write_format(schema: _Schema) -> None:
    """A format that engines do not enforce is an annotation."""
    if schema["format"] not in _FORMATS:
        pattern = _FORMAT_PATTERNS.get(schema.pop("format"))
        if pattern is not None:
            schema.setdefault("pattern", pattern)


def _write_pattern(schema: _Schema) -> bool:
    pattern: str = schema.pop("pattern")
    if (plain := without_lookarounds(pattern)) is not None:
        schema["pattern"] = plain
    return plain == pattern


def _name_properties(schema: _Schema, names: Any) -> bool:
    """Replaces propertyNames, which has been removed, by the names or their pattern."""
    if _says_nothing(names) or (isinstance(names, dict) and names.keys() <= _ANNOTATIONS):
        return True
    if names is False or {"properties", "patternProperties"} & schema.keys():
        return False
    texts = [names["const"]] if "const" in names else names.get("enum", ())
    given, used = names.get("pattern"), "pattern"
    pattern = given and without_lookarounds(given)
    if texts and all(isinstance(text, str) for text in texts):
        pattern = given = f"^({'|'.join(map(re.escape, texts))})$"
        used = "const" if "const" in names else "enum"
    if not pattern:
        return False
    schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
    schema["additionalProperties"] = False
    return pattern == given and set(names) <= {*_ANNOTATIONS, used}


def _close(schema: _Schema, name: str, instead: str) -> bool:
    """Replaces a keyword by another one where nothing else evaluates properties or items."""
    value = schema.pop(name)
    if _says_nothing(value) or instead in schema:
        return True
    if not schema.keys().isdisjoint(_COMPOSITIONS):
        return False
    schema[instead] = value
    return True


# A schema has one resource, as clients send it.
_RENAMED: Final[Mapping[str, str]] = {
    "$dynamicAnchor": "$anchor",
    "$dynamicRef": "$ref",
    "$recursiveRef": "$ref",
}
_DROPPED: Final[Mapping[str, Callable[[Any, _Schema], bool]]] = {
    # These say nothing by themselves.
    **dict.fromkeys(
        ("$recursiveAnchor", "else", "maxContains", "minContains", "then"), lambda *_: True
    ),
    **dict.fromkeys(
        ("dependencies", "dependentRequired", "dependentSchemas"),
        lambda value, _: all(one == [] or _says_nothing(one) for one in value.values()),
    ),
    "contains": lambda *_: False,
    "if": lambda _, given: all(_says_nothing(given.get(one, True)) for one in ("then", "else")),
    "not": lambda value, _: value is False,
    "uniqueItems": lambda value, given: value is False or given.get("maxItems") in (0, 1),
}
"""Keywords that no engine enforces. Each function returns whether a value says nothing in a schema."""
