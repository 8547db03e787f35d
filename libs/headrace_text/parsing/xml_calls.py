"""Tool calls of Qwen3-Coder: a function element with one element for each argument."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace_text.parsing.buffered import BufferedParser, CallArguments, CallStart
from headrace_text.parsing.schema_types import converted

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
            self._state = self._close_call if tag == _FUNCTION_END else self._after_call
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
        self._skip_space()
        closed = self._starts_with(_CALL_END)
        if closed is None:
            return False
        if closed:
            self._take(len(_CALL_END))
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        self._skip_space()
        if not self._text:
            return False
        self._state = self._start
        return True
