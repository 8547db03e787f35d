"""Finds the end of JSON values and of calls in text that arrives in parts."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from headrace_text.parsing.buffered import CallArguments, CallStart, Piece

_SPACE = " \t\r\n"
_SIGNS = re.compile(r'["{}\[\]]')
_CALL_SIGNS = re.compile(r"[\"'()\[\]{}]")
_STRING_SIGNS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_SCALAR_ENDS = re.compile(r"[,}\] \t\r\n]")
_ARGUMENT_KEYS = ("arguments", "parameters")
# A text that begins with another key is an answer in JSON, not a call.
_OTHER_KEYS = ("type", "id", "index")


class ValueScanner:
    """Finds the end of one JSON value, or of a call in Python. It checks brackets and strings only."""

    def __init__(self, *, is_call: bool = False) -> None:
        """`is_call`: the text begins with a name and a bracket."""
        self.done = False
        self._signs = _CALL_SIGNS if is_call else _SIGNS
        self._kind = "call" if is_call else ""
        self._depth = 0
        self._quote = ""
        """That of the string that is open."""
        self._escaped = False

    def scan(self, text: str) -> int:
        """How many characters of `text`, after those of earlier calls, are of the value.

        `text` must not begin with spaces before the first character of the value.
        """
        position = 0
        if not self._kind and text:
            self._kind = text[0] if text[0] in '{["' else "scalar"
        if self._kind == "scalar":
            match = _SCALAR_ENDS.search(text)
            self.done = match is not None
            return len(text) if match is None else match.start()
        while position < len(text) and not self.done:
            position = (
                self._skip_string(text, position) if self._quote else self._next(text, position)
            )
        return position

    def _next(self, text: str, position: int) -> int:
        match = self._signs.search(text, position)
        if match is None:
            return len(text)
        if match[0] in _STRING_SIGNS:
            self._quote = match[0]
        elif match[0] in "{[(":
            self._depth += 1
        else:
            self._depth -= 1
            self.done = self._depth <= 0
        return match.end()

    def _skip_string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        match = _STRING_SIGNS[self._quote].search(text, position)
        if match is None:
            return len(text)
        if match[0] == "\\":
            self._escaped = True
        else:
            self._quote = ""
            self.done = not self._depth
        return match.end()


class _At(Enum):
    OPENING = auto()
    KEY = auto()
    COLON = auto()
    VALUE_START = auto()
    VALUE = auto()
    END = auto()


class CallObject:
    """Reads one call, {"name": ..., "arguments": {...}}, and returns its pieces as they arrive.

    The arguments may be called parameters.
    """

    def __init__(self) -> None:
        self.failed = False
        """Whether the text is no such object. `raw` then has all of it that was taken."""
        self.raw = ""
        """The text that was taken, until the name is known."""
        self._at = _At.OPENING
        self._scanner = ValueScanner()
        self._key = ""
        self._value = ""
        self._name = ""
        self._arguments = ""
        self._streaming = False
        self._has_arguments = False
        self._pieces: list[Piece] = []

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.END

    @property
    def started(self) -> bool:
        """Whether the call's name is known."""
        return bool(self._name)

    def feed(self, text: str) -> tuple[int, list[Piece]]:
        """The number of characters taken, and the pieces that they complete."""
        position = 0
        while position < len(text) and not self.done and not self.failed:
            position = self._step(text, position)
        if not self.started or self.failed:
            self.raw += text[:position]
        pieces, self._pieces = self._pieces, []
        return position, pieces

    def _step(self, text: str, position: int) -> int:
        if self._at is _At.VALUE:
            return self._read_value(text, position)
        sign = text[position]
        if sign in _SPACE:
            return position + 1
        if self._at is _At.VALUE_START:
            self._begin_value(sign)
            return position
        if self._at is _At.KEY and sign == '"':
            self._key = ""
            self._begin_value(sign)
            return position
        if self._at is _At.KEY and sign == ",":
            return position + 1
        if self._at is _At.KEY and sign == "}":
            self._end()
            return position + 1
        following = {(_At.OPENING, "{"): _At.KEY, (_At.COLON, ":"): _At.VALUE_START}
        at = following.get((self._at, sign))
        if at is None:
            self.failed = True
            return position
        self._at = at
        return position + 1

    def _begin_value(self, sign: str) -> None:
        self._at = _At.VALUE
        self._scanner = ValueScanner()
        self._value = ""
        self._streaming = bool(self._name) and self._key in _ARGUMENT_KEYS and sign == "{"
        self._has_arguments |= self._streaming

    def _read_value(self, text: str, position: int) -> int:
        part = text[position:]
        size = self._scanner.scan(part)
        if self._streaming:
            self._add_arguments(part[:size])
        else:
            self._value += part[:size]
        if self._scanner.done:
            self._store_value()
        return position + size

    def _store_value(self) -> None:
        if self._streaming:
            self._streaming = False
            self._at = _At.KEY
            return
        try:
            value = json.loads(self._value)
        except (ValueError, RecursionError):
            self.failed = True
            return
        if not self._key:
            self._key = str(value)
            self._at = _At.COLON
            self.failed = self._key not in ("name", *_ARGUMENT_KEYS, *_OTHER_KEYS)
            return
        self._at = _At.KEY
        if self._key == "name":
            self._start(value)
        elif self._key in _ARGUMENT_KEYS and value is not None:
            # Some models write the object as a string.
            self._arguments = value if isinstance(value, str) else self._value

    def _start(self, name: object) -> None:
        if not isinstance(name, str) or not name or self._name:
            self.failed = True
            return
        self._name = name
        self._pieces.append(CallStart(name))

    def _end(self) -> None:
        if not self._name:
            self.failed = True
            return
        self._at = _At.END
        if not self._has_arguments:
            self._add_arguments(self._arguments or "{}")

    def _add_arguments(self, text: str) -> None:
        if text:
            self._pieces.append(CallArguments(text))
