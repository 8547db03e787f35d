"""Tool calls that are a Python list of calls."""

from __future__ import annotations

import ast
import json
import re

from headrace_text.parsing.buffered import BufferedParser, CallArguments, CallStart
from headrace_text.parsing.json_values import ValueScanner

_NAME = re.compile(r"\s*[A-Za-z_][\w.]*\s*\(")
_NAME_BEGINNING = re.compile(r"\s*([A-Za-z_][\w.]*\s*)?")


class PythonicCalls(BufferedParser):
    """A text that begins with [name(key=value), ...]. Each call is returned when it is complete.

    `tags` may stand around the list.
    """

    def __init__(self, tags: tuple[str, str] = ("", "")) -> None:
        super().__init__()
        self._opening, self._closing = tags
        self._taken = ""
        """The text of a list without a call so far."""
        self._scanned = 0
        self._scanner = ValueScanner(is_call=True)

    def _start(self) -> bool:
        text = self._text.lstrip()
        if not text:
            return self._pass_on() if self._ended else False
        if self._opening and text.startswith(self._opening):
            text = text.removeprefix(self._opening).lstrip()
        elif self._opening and not self._ended and self._opening.startswith(text):
            return False
        if not text and not self._ended:
            return False
        if text.startswith("["):
            self._taken = self._take(len(self._text) - len(text) + 1)
            self._state = self._open_call
        else:
            self._state = self._pass_on
        return True

    def _pass_on(self) -> bool:
        """The rest is content."""
        self._add_content(self._taken + self._take(len(self._text)))
        self._taken = ""
        return False

    def _open_call(self) -> bool:
        text = self._text.lstrip(", \t\r\n")
        if not text:
            return self._pass_on() if self._ended and self._taken else False
        if text.startswith("]") and not self._taken:
            self._text = text[1:]
            self._state = self._close_list
        elif _NAME.match(text):
            self._taken += self._take(len(self._text) - len(text)) if self._taken else ""
            self._text = text
            self._scanned, self._scanner = 0, ValueScanner(is_call=True)
            self._state = self._read_call
        elif _NAME_BEGINNING.fullmatch(text) and not self._ended:
            return False
        else:
            self._state = self._pass_on
        return True

    def _read_call(self) -> bool:
        self._scanned += self._scanner.scan(self._text[self._scanned :])
        if self._scanner.done:
            return self._return_call()
        return self._pass_on() if self._ended and self._taken else False

    def _return_call(self) -> bool:
        source = self._text[: self._scanned]
        call = parse_call(source)
        if call is None:
            self._state = self._pass_on
            return True
        self._take(self._scanned)
        self._taken = ""
        name, arguments = call
        self._pieces += (CallStart(name), CallArguments(arguments))
        self._state = self._open_call
        return True

    def _close_list(self) -> bool:
        return self._pass_tag(self._closing, self._pass_on)


def parse_call(source: str) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of a call with literal arguments. None for other text."""
    try:
        call = ast.parse(source.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {item.arg: _literal(item.value) for item in call.keywords if item.arg}
        if len(arguments) < len(call.keywords):
            return None
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)
    # The last two are what Python raises for text that is nested too deeply.
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> object:
    # Models also write the words of JSON.
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, set) else value
