"""The types of arguments that a model writes as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_text.parsing.buffered import CallArguments
from headrace_text.parsing.registry import AnswerParser, new_tool_call_parser
from headrace_text.parsing.xml_calls import converted

STRING_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ROOT = {
    "$defs": {
        "name/of": {"type": "string"},
        "maybe": {"oneOf": [{"$ref": "#/$defs/name~1of"}, {"type": "null"}]},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]},
    },
    "properties": {"x": {"type": "integer"}},
}


@pytest.mark.parametrize(
    "text", ["5", "true", "[1]", '{"a": 1}', "None", "1e999", '"quoted"', " 5"]
)
@pytest.mark.parametrize(
    "schema",
    [
        STRING_OR_NULL,
        {"oneOf": [{"type": "string"}, {"type": "null"}]},
        {"allOf": [{"type": "string"}]},
        {"type": "string"},
        {"type": ["string", "null"]},
        {"enum": ["5", "true"]},
        {"const": "5"},
        {"$ref": "#/$defs/name~1of"},
        {"$ref": "#/$defs/maybe"},
        {"$ref": "#/$defs/loop"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "http://127.0.0.1:1/x"},
        {},
        None,
        True,
    ],
)
def test_a_string_stays_one(text: str, schema: Any) -> None:
    assert converted(text, schema, ROOT) == text


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("null", STRING_OR_NULL, None),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"$ref": "#/$defs/maybe"}, None),
        ("null", {"type": "string"}, "null"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, 5.5),
        ("5", {"type": "number"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("5", {"$ref": "#/properties/x"}, 5),
        ("5", {"enum": [5, 6]}, 5),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": ["boolean", "string"]}, True),
        ("None", {"type": "integer"}, None),
        ("[1]", {"type": "array"}, [1]),
        ('{"a": 1}', {"type": ["object", "null"]}, {"a": 1}),
        ("[1e999]", {"type": "array"}, "[1e999]"),
    ],
)
def test_other_types_are_those_of_the_schema(text: str, schema: Any, value: Any) -> None:
    found = converted(text, schema, ROOT)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("name", ["qwen3_coder", "qwen3_xml"])
def test_the_arguments_of_a_call_have_the_types_of_its_schema(name: str) -> None:
    schema = {
        "properties": {"x": STRING_OR_NULL, "y": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer"}},
    }
    parser = AnswerParser(None, new_tool_call_parser(name, {"f": schema}))
    values = "".join(f"<parameter={key}>\n5\n</parameter>\n" for key in "xy")
    text = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    pieces = parser.feed(text) + parser.finish()
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    assert json.loads(arguments) == {"x": "5", "y": 5}
