"""What engines can enforce of a JSON Schema. The rest is rewritten, dropped where it says nothing, or named. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from typing import Any, Final, TypeAlias

from headrace_common.limits import SCHEMA_BYTES_MAX
from headrace_frontend.request.json_text import exceeds_levels
from headrace_frontend.request.schema import keyword_problem, resolved
from headrace_text.constraints import SchemaPath, extends, with_parts

_Schema: TypeAlias = dict[str, Any]
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
