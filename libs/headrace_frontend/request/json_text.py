"""JSON that clients send, within bounds. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from headrace_common.limits import JSON_LEVELS_MAX

# One that has no end reaches to the end of the data, so that the time is linear.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_LONE_SURROGATE: Final = re.compile(
    r"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])"
)
NO_TEXT: Final = "must not hold half of a surrogate pair, which is no text; leave it out"


class JsonRejected(Exception):
    """A text is not a JSON object within the bounds. The message is the remedy."""


def parse_object(text: str, bytes_max: int) -> dict[str, Any]:
    """The object in `text`. Raises JsonRejected."""
    size = len(text.encode())
    if size > bytes_max:
        raise JsonRejected(f"must have at most {bytes_max} bytes, not {size}")
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise JsonRejected(_TOO_DEEP) from None
    except ValueError as error:
        raise JsonRejected(f"must be the text of a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise JsonRejected(f"must be the text of a JSON object, not of {_kind(value)}")
    if exceeds_levels(value):
        raise JsonRejected(_TOO_DEEP)
    if not is_text(text):
        raise JsonRejected(NO_TEXT)
    return value


def is_text(text: str) -> bool:
    """False for JSON with half of a surrogate pair. It is an escape sequence, and names no character."""
    # An escaped backslash before "u" is no such sequence.
    escapes = text.replace("\\\\", "  ") if "\\\\" in text else text
    return not _LONE_SURROGATE.search(escapes)


def values_at_most(data: bytes) -> int:
    """At most so many values are in some JSON. Texts in it may have as many commas and brackets."""
    return 1 + len(data) - len(data.translate(None, b",[{"))


def count_values(data: bytes, strings_max: int) -> tuple[int, int]:
    """The values in some JSON, and the strings, names of fields, arrays and objects in it.

    It stops at more than `strings_max` strings, and counts no more then.
    """
    bare, strings = _STRING.subn(b'"', data, count=strings_max + 1)
    return values_at_most(bare), strings + bare.count(b"[") + bare.count(b"{")


_TOO_DEEP = f"must have at most {JSON_LEVELS_MAX} levels of objects and arrays"


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _kind(value: object) -> str:
    return "an array" if isinstance(value, list) else "a plain value"


def exceeds_levels(value: dict[str, Any]) -> bool:
    """Whether an object has more levels of objects and arrays than a request may have."""
    level: list[Any] = [value]
    for _ in range(JSON_LEVELS_MAX):
        children = (
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
        )
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True
