"""JSON objects that clients send as text, within bounds. Pure."""

from __future__ import annotations

import json
from typing import Any

from headrace_common.limits import JSON_LEVELS_MAX


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
    if _exceeds_levels(value):
        raise JsonRejected(_TOO_DEEP)
    return value


_TOO_DEEP = f"must have at most {JSON_LEVELS_MAX} levels of objects and arrays"


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _kind(value: object) -> str:
    return "an array" if isinstance(value, list) else "a plain value"


def _exceeds_levels(value: dict[str, Any]) -> bool:
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
