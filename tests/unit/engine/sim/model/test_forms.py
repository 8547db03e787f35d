"""JSON values that match a schema, for the simulated model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_engine.interface import StructuredOutputs
from headrace_engine.sim.model.sampling import texts_of_form


def example(schema: Any) -> Any:
    (text,) = texts_of_form(StructuredOutputs("json", json.dumps(schema)))
    return json.loads(text)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "sim"),
        ({"type": ["integer", "null"], "minimum": 7}, 7),
        ({"enum": ["a", "b"]}, "a"),
        ({"const": 5}, 5),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, [None, None]),
        (
            {"$defs": {"A": {"properties": {"x": {"type": "number"}}}}, "$ref": "#/$defs/A"},
            {"x": 0.5},
        ),
    ],
)
def test_a_schema_has_a_value(schema: Any, value: Any) -> None:
    assert example(schema) == value


def test_a_schema_that_contains_itself_ends() -> None:
    node = {"properties": {"next": {"$ref": "#/$defs/N"}}}
    assert "next" in example({"$defs": {"N": node}, "$ref": "#/$defs/N"})


def test_choices_and_objects_are_texts() -> None:
    assert texts_of_form(StructuredOutputs("choice", choices=("a", "b"))) == ("a", "b")
    assert texts_of_form(StructuredOutputs("json_object")) == ("{}",)
