"""JSON Schemas of clients as engines enforce them, with the compiler of the engines."""

from __future__ import annotations

import json
from typing import Any, Final
from unittest import mock

import pytest

from headrace_engine.vllm.service.constraint_compiler import _Bytes
from headrace_frontend.request.schema import enforceable, schema_problem
from headrace_text.constraints import closed_schema
from tests.kit.openai_app import LocalApp

llguidance = pytest.importorskip("llguidance")

OBJECT: Final = {"type": "object"}
BY_NAME: Final = [{**OBJECT, "properties": {name: {}}, "required": [name]} for name in "ab"]
SHORT: Final = {"pattern": "^a", "maxLength": 2}
AB: Final = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ZOD_EMAIL: Final = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DECIMAL: Final = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
ONE_OF: Final = [
    {**OBJECT, "properties": {"k": {"const": "a"}, "x": {}}, "required": ["k"]},
    {**OBJECT, "properties": {"k": {"const": "b"}}, "required": ["k"]},
]
# A schema, a value that matches, one that does not, and the keyword that is not enforced.
SCHEMAS: Final[list[tuple[dict[str, Any], str, str, str]]] = [
    ({"type": "string", "format": "path"}, '"x"', "1", ""),
    ({"type": ["string", "null"], "format": "markdown"}, "null", "1", ""),
    ({"type": "string", "format": "json-pointer"}, '"/a~0/b"', '"a"', ""),
    ({"type": "string", "format": "uri-reference"}, '"../a?b#c"', '"a b"', ""),
    ({"type": "string", "format": "uri-template"}, '"/a/{b}"', '"/a/{b"', ""),
    ({"type": "array", "uniqueItems": False}, "[1,1]", "{}", ""),
    ({"type": "array", "uniqueItems": True}, "[1]", "{}", "uniqueItems"),
    ({**OBJECT, "propertyNames": {"type": "string"}}, '{"a":1}', "1", ""),
    ({**OBJECT, "propertyNames": {"pattern": "^a"}}, '{"ab":1}', '{"b":1}', ""),
    (
        {
            "$defs": {"n": {"type": "string", "enum": ["a.", "b"]}},
            **OBJECT,
            "propertyNames": {"$ref": "#/$defs/n"},
            "additionalProperties": {"type": "integer"},
        },
        '{"a.":1}',
        '{"ax":1}',
        "",
    ),
    ({**OBJECT, "propertyNames": {"minLength": 2}}, '{"a":1}', "1", "propertyNames"),
    ({**OBJECT, "propertyNames": SHORT}, '{"abc":1}', '{"b":1}', "propertyNames"),
    ({"type": "array", "contains": {"const": 1}}, "[2]", "{}", "contains"),
    ({**OBJECT, "if": {}, "then": {}}, "{}", "1", ""),
    ({**OBJECT, "then": {"required": ["a"]}, "if": {"required": ["b"]}}, "{}", "1", "if"),
    ({"type": "string", "not": {"const": "a"}}, '"a"', "1", "not"),
    ({**OBJECT, "properties": {"a": {"not": {}}, "b": {}}}, '{"b":1}', '{"a":1}', ""),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, '{"a":1}', "1", "dependentRequired"),
    ({**OBJECT, "dependentSchemas": {"a": {}}}, "{}", "1", ""),
    ({**OBJECT, "properties": AB, "unevaluatedProperties": False}, '{"a":1}', '{"c":1}', ""),
    (
        {"$dynamicAnchor": "n", **OBJECT, "properties": {"c": {"$dynamicRef": "#n"}}},
        '{"c":{"c":{}}}',
        '{"c":1}',
        "",
    ),
    ({"type": "string", "pattern": ZOD_EMAIL}, '"a@b.cd"', '"a@b"', "pattern"),
    ({"anyOf": [{"type": "string", "pattern": DECIMAL}]}, '"-1.5"', '"a"', "anyOf.0.pattern"),
    ({"type": "string", "pattern": r"(a)\1"}, '"aa"', "1", "pattern"),
    ({"type": "string", "pattern": r"^[\](?!](?!y)x$"}, '"]x"', '"x"', "pattern"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1", '"a"', "oneOf"),
    ({"allOf": [{"oneOf": BY_NAME}]}, '{"a":1}', '{"c":1}', "allOf.0.oneOf"),
    ({"oneOf": ONE_OF}, '{"k":"a","x":1}', '{"k":"b","x":1}', ""),
    (
        {"$defs": {"n": BY_NAME[0]}, "$ref": "#/$defs/n", "properties": AB, "required": ["b"]},
        '{"a":1,"b":2}',
        '{"a":1}',
        "",
    ),
]


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Whether the engines' compiler takes the schema, and permits the text."""
    closed = closed_schema(json.dumps(schema))
    grammar = llguidance.LLMatcher.grammar_from_json_schema(closed)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "valid", "invalid", "lacking"),
    SCHEMAS,
    ids=[json.dumps(schema)[:60] for schema, *_ in SCHEMAS],
)
def test_engines_take_each_keyword_or_it_is_named(
    schema: dict[str, Any], valid: str, invalid: str, lacking: str
) -> None:
    enforced, named = enforceable(schema)
    assert named == ([lacking] if lacking else [])
    assert accepts(enforced, valid)
    assert not accepts(enforced, invalid)


def nested(reference: str, required: list[str]) -> dict[str, Any]:
    part = {**OBJECT, "properties": {"a": {"$ref": reference}}, "required": required}
    return {"$defs": {"p": part}, "$ref": "#/$defs/p"}


@pytest.mark.parametrize(
    ("schema", "finite"),
    [
        (nested("#/$defs/p", ["a"]), False),
        (nested("#/$defs/p", []), True),
        (nested("#", ["a"]), False),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, True),
        ({"default": {**OBJECT, "required": 5}, "$ref": "#/default"}, True),
    ],
)
def test_a_schema_that_no_finite_value_matches_is_rejected(
    schema: dict[str, Any], finite: bool
) -> None:
    problem = schema_problem(json.dumps(schema))
    assert problem is None if finite else problem is not None and "no finite value" in problem


async def test_what_is_not_enforced_is_named_or_rejected_where_it_is_strict() -> None:
    schema = {**OBJECT, "properties": {"a": {"type": "array", "uniqueItems": True}}}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    function = {"name": "f", "parameters": schema}
    form = {"name": "x", "schema": schema}
    app = LocalApp()
    for strict in (False, True):
        given = {"type": "json_schema", "json_schema": {**form, "strict": strict}}
        asked: list[tuple[dict[str, Any], str]] = [
            (
                {"response_format": given},
                "response_format.json_schema.schema.properties.a.uniqueItems",
            ),
            (
                {
                    "tools": [{"type": "function", "function": {**function, "strict": strict}}],
                    "tool_choice": "required",
                },
                "tools.function.parameters.properties.a.uniqueItems",
            ),
        ]
        for fields, path in asked:
            reply = await app.post("/v1/chat/completions", {**chat, **fields})
            if strict:
                assert reply.status == 400
                assert (
                    "properties.a.uniqueItems cannot be enforced" in reply.json["error"]["message"]
                )
            else:
                assert reply.headers["x-headrace-ignored-fields"] == path


def test_schemas_of_attackers_take_little_time() -> None:
    """Quadratic ones would take minutes."""
    alternatives = [{"const": number} for number in range(1_000)]
    enforced, lacking = enforceable({"oneOf": alternatives, "pattern": "[" * 40_000})
    assert lacking == ["oneOf"]
    assert enforced["pattern"] == "[" * 40_000
    values = [{"enum": [[number, index] for index in range(16)]} for number in range(90)]
    with mock.patch.object(json, "dumps", wraps=json.dumps) as dumps:
        assert enforceable({"oneOf": values}) == ({"oneOf": values}, [])
    assert dumps.call_count < 90 * 16 + 10
    assert enforceable(large := {"pattern": "(" * 1_000_000}) == (large, [])
