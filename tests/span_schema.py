"""Compares recorded spans with the schema of telemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SynchronousMultiSpanProcessor

from headrace_common.telemetry.later import SpanMaker
from telemetry_schema import SCHEMA, load

_LOADED = load(SCHEMA.read_text(encoding="utf-8"))
_PYTHON_TYPES = {"string": str, "int": int, "double": float, "bool": bool}


def _names(section: str, prefix: str) -> dict[str, str]:
    return {prefix + key: entry["name"] for key, entry in _LOADED[section].items()}


_PLACES = {**_names("spans", "SPAN_"), **_names("events", "EVENT_")}
ATTRIBUTES: dict[tuple[str, str], str] = {
    (_PLACES[place], entry["name"]): entry["type"]
    for entry in _LOADED["attributes"].values()
    for place in entry["of"]
    if place in _PLACES
}
"""The types of attributes, by the span or event and the attribute's name."""
_EVENTS = {
    (_PLACES[place], entry["name"]) for entry in _LOADED["events"].values() for place in entry["of"]
}
_SPANS = frozenset(_names("spans", "SPAN_").values())


def problems_of(span: ReadableSpan) -> Iterator[str]:
    """Yields what the schema does not have. Spans with other names belong to tests."""
    if span.name not in _SPANS:
        return
    yield from _attribute_problems(span.name, span.attributes or {})
    for event in span.events:
        if (span.name, event.name) not in _EVENTS:
            yield f"{span.name} has an event {event.name}"
        yield from _attribute_problems(event.name, event.attributes or {})


def _attribute_problems(place: str, attributes: Mapping[str, Any]) -> Iterator[str]:
    for name, value in attributes.items():
        kind = ATTRIBUTES.get((place, name))
        if kind is None:
            yield f"{place} has an attribute {name}"
            continue
        values = value if kind.endswith("[]") else [value]
        expected = _PYTHON_TYPES[kind.removesuffix("[]")]
        if not all(type(item) is expected for item in values):
            yield f"{name} of {place} is {value!r}, not {kind}"


@contextmanager
def spans_follow_schema() -> Iterator[set[str]]:
    """Checks every span that this process records. Yields the problems found so far."""
    problems: set[str] = set()
    on_end, made = SynchronousMultiSpanProcessor.on_end, SpanMaker.at

    def checked(processor: SynchronousMultiSpanProcessor, span: ReadableSpan) -> None:
        problems.update(problems_of(span))
        on_end(processor, span)

    def checked_later(*values: Any, **named: Any) -> ReadableSpan:
        span = made(*values, **named)
        problems.update(problems_of(span))
        return span

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SynchronousMultiSpanProcessor, "on_end", checked)
        patch.setattr(SpanMaker, "at", checked_later)
        yield problems
    assert not problems, "\n".join(sorted(problems))
