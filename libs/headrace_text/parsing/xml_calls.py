"""Tool calls of Qwen3-Coder: a function element with one element for each argument."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from headrace_text.parsing.buffered import BufferedParser, CallArguments, CallStart

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


_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"


class XmlCalls(BufferedParser):
    """Returns each argument when it is complete. `schemas` has the JSON schema of each tool's arguments by name.

    The schema decides the type of an argument.
    """

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        super().__init__()
        self._schemas = schemas
        self._name = ""
        self._key = ""
        self._value = ""
        self._count = 0

    def _start(self) -> bool:
        content, tag = self._take_before([_CALL, _FUNCTION])
        self._add_content(content)
        if tag == _FUNCTION:
            self._state = self._read_name
        elif tag:
            self._state = self._open_function
        return bool(tag)

    def _open_function(self) -> bool:
        text = self._text.lstrip()
        if text.startswith(_FUNCTION):
            self._text = text.removeprefix(_FUNCTION)
            self._state = self._read_name
            return True
        if _FUNCTION.startswith(text) and not self._ended:
            return False
        self._add_content(_CALL)
        self._state = self._start
        return True

    def _read_name(self) -> bool:
        name, end, rest = self._text.partition(">")
        if not end:
            if self._ended:
                self._add_content(_FUNCTION + self._take(len(self._text)))
            return False
        self._text = rest
        self._name, self._count = name.strip(), 0
        self._pieces.append(CallStart(self._name))
        self._state = self._read_parameters
        return True

    def _read_parameters(self) -> bool:
        _, tag = self._take_before([_PARAMETER, _FUNCTION_END, _CALL_END])
        if tag == _PARAMETER:
            self._state = self._read_key
        elif tag:
            self._pieces.append(CallArguments("}" if self._count else "{}"))
            self._state = self._close_call if tag == _FUNCTION_END else self._start_again
        return bool(tag)

    def _read_key(self) -> bool:
        key, end, rest = self._text.partition(">")
        if not end:
            return False
        self._key, self._value, self._text = key.strip(), "", rest
        self._state = self._read_value
        return True

    def _read_value(self) -> bool:
        part, tag = self._take_before([_PARAMETER_END, _PARAMETER, _FUNCTION_END])
        self._value += part
        if not tag:
            return False
        value = self._value.removeprefix("\n").removesuffix("\n")
        opening = ", " if self._count else "{"
        key = json.dumps(self._key, ensure_ascii=False)
        self._pieces.append(CallArguments(f"{opening}{key}: {self._json_of(value)}"))
        self._count += 1
        if tag != _PARAMETER_END:
            self._text = tag + self._text
        self._state = self._read_parameters
        return True

    def _json_of(self, value: str) -> str:
        root = self._schemas.get(self._name)
        properties = root.get("properties") if isinstance(root, dict) else None
        schema = properties.get(self._key) if isinstance(properties, dict) else None
        return json.dumps(converted(value, schema, root), ensure_ascii=False)

    def _close_call(self) -> bool:
        return self._pass_tag(_CALL_END, self._start_again)
