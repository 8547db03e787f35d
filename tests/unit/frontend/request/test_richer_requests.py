"""Invalid tools, template variables, constraints and counts of answers, reported by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, SchemaError

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, sampling_pb2, tools_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.rpc.field_bounds import find_excess
from headrace_frontend.request.chat import (
    forced_call_schema,
    messages_of,
    template_kwargs_of,
    tools_of,
)
from headrace_frontend.request.schema import schema_problem
from headrace_kv.layout import WorkerRef
from headrace_router.dispatch.messages import BY_PREFILL, prefill_task
from headrace_text.load import ByteCodec
from tests.kit.requests import prepared

Mode = tools_pb2.ToolChoice.Mode
_SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}}'
_CODEC = ByteCodec()


def _chat(**fields: Any) -> inference_pb2.GenerateRequest:
    message = inference_pb2.ChatMessage(role="user", content="x")
    chat = inference_pb2.Chat(messages=[message], **fields)
    return inference_pb2.GenerateRequest(chat=chat)


def _message(**fields: Any) -> inference_pb2.GenerateRequest:
    request = _chat()
    request.chat.messages.append(inference_pb2.ChatMessage(**fields))
    return request


def _tool(name: str = "look", parameters: str = _SCHEMA) -> tools_pb2.Tool:
    return tools_pb2.Tool(name=name, parameters=parameters)


def _choice(**fields: Any) -> inference_pb2.GenerateRequest:
    return _chat(tools=[_tool()], tool_choice=tools_pb2.ToolChoice(**fields))


def _sampling(**fields: Any) -> inference_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(**fields)
    return inference_pb2.GenerateRequest(text="x", sampling=sampling)


def _outputs(**fields: Any) -> inference_pb2.GenerateRequest:
    return _sampling(structured_outputs=sampling_pb2.StructuredOutputs(**fields))


def _texts(*texts: str) -> inference_pb2.GenerateRequest:
    return _outputs(choice=sampling_pb2.Choice(texts=texts))


def _tag(
    triggers: Any = ("<f",), structures: Any = None, **fields: Any
) -> inference_pb2.GenerateRequest:
    structure = {"begin": "<f>", "schema": {}, "end": "</f>", **fields}
    tag = {"triggers": triggers, "structures": structures or [structure]}
    return _outputs(structural_tag=json.dumps(tag))


def _sequence(*ids: int) -> list[sampling_pb2.TokenSequence]:
    return [sampling_pb2.TokenSequence(ids=ids)]


def _answers(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="x", **fields)


_CALL = tools_pb2.ToolCall(name="look")
_DEEP = '{"a":' * 65 + "1" + "}" * 65

_INVALID: list[tuple[inference_pb2.GenerateRequest, str, str]] = [
    (_message(role="user", tool_calls=[_CALL]), "chat.messages[1].tool_calls", "role assistant"),
    (_message(role="user", reasoning="x"), "chat.messages[1].reasoning", "role assistant"),
    (_message(role="user", tool_call_id="x"), "chat.messages[1].tool_call_id", "role tool"),
    (_message(role="user", name="x" * 129), "chat.messages[1].name", "at most 128 characters"),
    (
        _message(role="assistant", tool_calls=[tools_pb2.ToolCall()]),
        *("chat.messages[1].tool_calls[0].name", "not be empty"),
    ),
    (
        _message(role="assistant", tool_calls=[_CALL] * 1_025),
        *("chat.messages[1].tool_calls", "at most 1024 calls, not 1025"),
    ),
    (_chat(tools=[_tool("a b")]), "chat.tools[0].name", "1 to 128 letters"),
    (_chat(tools=[_tool(), _tool()]), "chat.tools[1].name", "choose another"),
    (_chat(tools=[_tool(parameters="[]")]), "chat.tools[0].parameters", "not of an array"),
    (_chat(tools=[_tool(parameters="{")]), "chat.tools[0].parameters", "JSON object"),
    (_chat(tools=[_tool(parameters='{"a": NaN}')]), "chat.tools[0].parameters", "NaN"),
    (_chat(tools=[_tool(parameters=_DEEP)]), "chat.tools[0].parameters", "at most 64 levels"),
    (
        _chat(tools=[_tool(parameters="[" * 60_000)]),
        *("chat.tools[0].parameters", "at most 64 levels"),
    ),
    (_chat(tools=[_tool(parameters=" " * 65_537)]), "chat.tools[0].parameters", "65536 bytes"),
    (_chat(tools=[_tool(f"t{i}") for i in range(1_025)]), "chat.tools", "at most 1024 tools"),
    (
        _chat(tool_choice=tools_pb2.ToolChoice(mode=Mode.MODE_REQUIRED)),
        *("chat.tool_choice.mode", "needs tools"),
    ),
    (_choice(mode=9), "chat.tool_choice.mode", "named values"),
    (_choice(mode=Mode.MODE_FUNCTION), "chat.tool_choice.function_name", "one of the tools"),
    (_choice(function_name="look"), "chat.tool_choice.function_name", "only MODE_FUNCTION"),
    (_choice(single_call=True), "chat.tool_choice.single_call", "only MODE_REQUIRED"),
    (_chat(template_kwargs="[]"), "chat.template_kwargs", "not of an array"),
    (_chat(template_kwargs='{"a": "\\ud800"}'), "chat.template_kwargs", "surrogate"),
    (
        _chat(tools=[_tool(parameters='{"title": "\\udc00"}')]),
        *("chat.tools[0].parameters", "surrogate"),
    ),
    (
        _message(
            role="assistant", tool_calls=[tools_pb2.ToolCall(name="a", arguments='["\\ud800"]')]
        ),
        *("chat.messages[1].tool_calls[0].arguments", "surrogate"),
    ),
    (_outputs(json='{"const": "\\ud800"}'), "sampling.structured_outputs.json", "surrogate"),
    (
        _outputs(structural_tag='{"a": "\\ud800"}'),
        *("sampling.structured_outputs.structural_tag", "surrogate"),
    ),
    (_chat(template_kwargs=f'{{"a": "{"x" * 16_384}"}}'), "chat.template_kwargs", "16384 bytes"),
    (_chat(template_kwargs='{"messages": []}'), "chat.template_kwargs", "messages cannot be set"),
    (_chat(template_kwargs='{"bos_token": ""}'), "chat.template_kwargs", "bos_token cannot"),
    (_outputs(), "sampling.structured_outputs", "set one of json"),
    (_outputs(json_object=False), "sampling.structured_outputs.json_object", "must be true"),
    (_outputs(json="true"), "sampling.structured_outputs.json", "not of a plain value"),
    (
        _outputs(json='{"properties": {"a": {"type": "objekt"}}}'),
        *("sampling.structured_outputs.json", "objekt' is not valid"),
    ),
    (
        _outputs(json='{"$schema": 5}'),
        *("sampling.structured_outputs.json", "$schema must be a string"),
    ),
    (
        _chat(
            tools=[_tool(parameters='{"type": 5}')],
            tool_choice=tools_pb2.ToolChoice(mode=Mode.MODE_REQUIRED),
        ),
        *("chat.tools[0].parameters", "5 is not valid"),
    ),
    (_outputs(regex=""), "sampling.structured_outputs.regex", "not be empty"),
    (_outputs(regex="a" * 4_097), "sampling.structured_outputs.regex", "at most 4096 bytes"),
    (_outputs(regex="a\0"), "sampling.structured_outputs.regex", "NUL"),
    (_outputs(grammar=" "), "sampling.structured_outputs.grammar", "not be empty"),
    (_outputs(grammar="a" * 65_537), "sampling.structured_outputs.grammar", "65536 bytes"),
    (_outputs(structural_tag="x"), "sampling.structured_outputs.structural_tag", "JSON object"),
    (_tag(triggers="<f"), "sampling.structured_outputs.structural_tag.triggers", "list of texts"),
    (_tag(triggers=[""]), "sampling.structured_outputs.structural_tag.triggers", "not empty"),
    (_tag(structures=[5]), "sampling.structured_outputs.structural_tag.structures", "of objects"),
    (_tag(begin=5), "sampling.structured_outputs.structural_tag.structures", "texts begin and end"),
    (_tag(schema=True), "sampling.structured_outputs.structural_tag.structures", "object schema"),
    (_texts(), "sampling.structured_outputs.choice.texts", "at least one"),
    (_texts(""), "sampling.structured_outputs.choice.texts[0]", "not be empty"),
    (_texts("x" * 1_025), "sampling.structured_outputs.choice.texts[0]", "1024 characters"),
    (_texts(*["x"] * 1_025), "sampling.structured_outputs.choice.texts", "at most 1024 texts"),
    (_sampling(logit_bias={5: 101}), "sampling.logit_bias[5]", "from -100 to 100, not 101"),
    (_sampling(logit_bias={5: float("nan")}), "sampling.logit_bias[5]", "from -100 to 100"),
    (_sampling(logit_bias={32_000: 1}), "sampling.logit_bias[32000]", "below 32000"),
    (
        _sampling(logit_bias=dict.fromkeys(range(1_025), 1.0)),
        *("sampling.logit_bias", "at most 1024 tokens, not 1025"),
    ),
    (_sampling(min_tokens=4, max_tokens=3), "sampling.min_tokens", "at most max_tokens, 3"),
    (_sampling(min_tokens=64), "sampling.min_tokens", "at most 63, the rest"),
    (_sampling(bad_words=[""]), "sampling.bad_words[0]", "not be empty"),
    (_sampling(bad_words=["x"] * 65), "sampling.bad_words", "at most 64 strings"),
    (_sampling(bad_words=["x" * 257]), "sampling.bad_words[0]", "at most 256 characters"),
    (
        _sampling(bad_token_sequences=_sequence()),
        *("sampling.bad_token_sequences[0].ids", "1 to 256 tokens, not 0"),
    ),
    (
        _sampling(bad_token_sequences=_sequence(1) * 257),
        *("sampling.bad_token_sequences", "at most 256 sequences"),
    ),
    (
        _sampling(bad_token_sequences=_sequence(3, 32_000)),
        *("sampling.bad_token_sequences[0].ids[1]", "below 32000"),
    ),
    (_sampling(allowed_token_ids=[32_000]), "sampling.allowed_token_ids[0]", "below 32000"),
    (
        _sampling(allowed_token_ids=[1] * 16_385),
        *("sampling.allowed_token_ids", "at most 16384 tokens"),
    ),
    (_answers(n=129), "n", "1 to 128, not 129"),
    (_answers(best_of=129), "best_of", "n to 128, not 129"),
    (_answers(n=3, best_of=2), "best_of", "at least n, 3"),
    (_answers(n=2, generated=inference_pb2.TokenIds(ids=[1])), "generated", "several answers"),
]


_WORDS = st.sampled_from(["a", "b", "string", "null", "objekt"])
_VALUES = (
    st.none()
    | st.integers(-2, 2)
    | st.just(1.5)
    | st.booleans()
    | _WORDS
    | st.lists(_WORDS, max_size=3)
)
_PLAIN_KEYWORDS: dict[Any, st.SearchStrategy[Any]] = dict.fromkeys(
    (
        *("type", "required", "enum", "const", "minimum", "multipleOf"),
        *("maxLength", "minItems", "uniqueItems", "title", "default", "unheard"),
    ),
    _VALUES,
)
_SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.fixed_dictionaries({}, optional=_PLAIN_KEYWORDS),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            **_PLAIN_KEYWORDS,
            **dict.fromkeys(("not", "items", "contains", "additionalProperties"), inner),
            **dict.fromkeys(("anyOf", "prefixItems"), st.lists(inner, max_size=2)),
            **dict.fromkeys(("properties", "$defs"), st.dictionaries(_WORDS, inner, max_size=2)),
        },
    ),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("request_", "field", "remedy"),
    _INVALID,
    ids=[f"{field}-{number}" for number, (_, field, _) in enumerate(_INVALID)],
)
def test_an_invalid_field_is_named_with_its_remedy(
    request_: inference_pb2.GenerateRequest, field: str, remedy: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepared(request_, context=64)
    assert remedy in caught.value.violations[field]


@pytest.mark.parametrize(
    "fill",
    [
        lambda message: message.tool_calls.add(name="x", arguments="y" * 1_100),
        lambda message: setattr(message, "reasoning", "y" * 1_100),
    ],
)
def test_all_texts_of_a_chat_count_before_it_is_tokenized(
    fill: Callable[[inference_pb2.ChatMessage], None],
) -> None:
    request = _message(role="assistant")
    fill(request.chat.messages[1])
    with pytest.raises(InvalidRequest, match="bytes of text"):
        prepared(request, context=64)


def test_a_chat_is_converted_for_its_template() -> None:
    call = tools_pb2.ToolCall(id="c1", name="look", arguments='{"city": "Rome"}')
    broken = tools_pb2.ToolCall(name="look", arguments='{"city": "Ro')
    message = inference_pb2.ChatMessage(role="assistant", tool_calls=[call, broken])
    tool = tools_pb2.Tool(name="look", description="d", parameters=_SCHEMA, strict=True)
    chat = inference_pb2.Chat(messages=[message], tools=[tool], template_kwargs='{"a": 1}')
    (converted,) = messages_of(chat)
    assert [call.arguments for call in converted.tool_calls] == [{"city": "Rome"}, {}]
    function = {
        "name": "look",
        "description": "d",
        "parameters": json.loads(_SCHEMA),
        "strict": True,
    }
    assert tools_of(chat) == [{"type": "function", "function": function}]
    assert template_kwargs_of(chat) == {"a": 1}


def test_a_forced_call_has_the_schema_of_its_function() -> None:
    assert forced_call_schema(_choice().chat) is None
    assert forced_call_schema(_choice(mode=Mode.MODE_NONE).chat) is None
    named = forced_call_schema(_choice(mode=Mode.MODE_FUNCTION, function_name="look").chat)
    assert json.loads(named or "") == json.loads(_SCHEMA)


@pytest.mark.parametrize("place", ["$defs", "definitions", "properties"])
def test_references_mean_the_same_in_all_forced_calls(place: str) -> None:
    parameters = {
        "type": "object",
        place: {"node": {"type": "integer", "default": {"$ref": "#/left alone"}}},
        "patternProperties": {"^const$": {"$ref": f"#/{place}/node"}},
        "additionalProperties": {"anyOf": [{"$ref": "#"}, {"$ref": f"#/{place}/node"}]},
        "required": ["a"],
    }
    # Another tool has other definitions by the same names.
    other = json.loads(json.dumps(parameters).replace("integer", "string"))
    chat = _choice(mode=Mode.MODE_REQUIRED).chat
    del chat.tools[:]
    chat.tools.extend([_tool("f", json.dumps(parameters)), _tool("g", json.dumps(other))])
    required = Draft202012Validator(json.loads(forced_call_schema(chat) or ""))
    chat.tool_choice.mode, chat.tool_choice.function_name = Mode.MODE_FUNCTION, "f"
    named = Draft202012Validator(json.loads(forced_call_schema(chat) or ""))
    for arguments, valid in (
        ({"a": 1, "const": 2}, True),
        ({"a": {"a": 1}}, True),
        ({"a": {}}, False),
        ({"a": "text"}, False),
        ({"a": 1, "const": "text"}, False),
    ):
        assert named.is_valid(arguments) == valid, arguments
        assert required.is_valid([{"name": "f", "parameters": arguments}]) == valid, arguments
    assert required.is_valid([{"name": "g", "parameters": {"a": "text"}}])


def test_workers_get_what_the_router_does_not_do_itself() -> None:
    found = prepared(
        _sampling(
            bad_words=[" ab"],
            bad_token_sequences=_sequence(5),
            logit_bias={3: 2.0},
            min_tokens=2,
            allowed_token_ids=[7, 8],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
        ),
        context=64,
    )
    sampling = found.sampling
    words = [list(sequence.ids) for sequence in sampling.bad_token_sequences]
    assert words == [[5], list(b"ab")]
    assert (dict(sampling.logit_bias), sampling.min_tokens) == ({3: 2.0}, 2)
    assert list(sampling.allowed_token_ids) == [7, 8]
    assert not sampling.bad_words
    assert not sampling.include_stop_str_in_output
    assert not sampling.HasField("skip_special_tokens")
    assert (found.keeps_stop, found.skips_special_tokens) == (True, False)
    most = _sampling(
        bad_words=["\N{MOUNT FUJI}" * 256] * 64, bad_token_sequences=_sequence(5) * 256
    )
    assert not find_excess(prepared(most, context=64).sampling)


def test_a_schema_may_name_its_draft_and_use_patterns_of_other_languages() -> None:
    for schema in (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]},
        {"$schema": "http://127.0.0.1:1/unknown", "pattern": "\\p{L}"},
        {"$ref": "http://127.0.0.1:1/elsewhere"},
    ):
        assert schema_problem(json.dumps(schema)) is None


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"items": {"minimum": "1"}}}}, "['properties']['a']['items']"),
        ({"anyOf": [{}, {"maxLength": -1}]}, "['anyOf'][1]['maxLength']"),
        ({"required": ["a", "a"]}, "['required']"),
        ({"allOf": []}, "['allOf']"),
        ({"not": [True]}, "['not']"),
        ({"dependencies": {"a": ["b"], "c": 5}}, "['dependencies']['c']"),
        ({"multipleOf": 0}, "['multipleOf']"),
        ({"$defs": {"a": {"type": []}}}, "['$defs']['a']['type']"),
    ],
)
def test_a_wrong_schema_is_rejected_with_the_place(schema: Any, place: str) -> None:
    problem = schema_problem(json.dumps(schema))
    assert problem is not None
    assert f"at {place}" in problem
    with pytest.raises(SchemaError):
        Draft202012Validator.check_schema(schema)


@given(_SCHEMAS)
def test_schemas_are_those_of_the_specification(schema: Any) -> None:
    accepted = schema_problem(json.dumps({"not": schema})) is None
    assert accepted == Draft202012Validator(Draft202012Validator.META_SCHEMA).is_valid(schema)


def test_the_schema_of_a_tool_that_the_model_only_reads_may_be_of_any_form() -> None:
    request = _chat(tools=[_tool(parameters='{"type": "objekt"}')])
    assert (
        prepared(request, context=512).sampling.structured_outputs.WhichOneof("constraint") is None
    )


def test_a_forced_call_becomes_a_structured_output() -> None:
    request = _choice(mode=Mode.MODE_FUNCTION, function_name="look")
    sampling = prepared(request, context=512).sampling
    assert json.loads(sampling.structured_outputs.json) == json.loads(_SCHEMA)
    request.sampling.structured_outputs.json_object = True
    with pytest.raises(InvalidRequest) as caught:
        prepared(request, context=512)
    assert "excludes" in caught.value.violations["chat.tool_choice.mode"]


def test_functions_that_make_no_schema_together_are_refused() -> None:
    request = _choice(mode=Mode.MODE_REQUIRED)
    del request.chat.tools[:]
    request.chat.tools.extend(_tool(f"t{i}", f'{{"{i}": "{"x" * 40_000}"}}') for i in range(2))
    with pytest.raises(InvalidRequest) as caught:
        prepared(request, context=64)
    assert "more than 65536" in caught.value.violations["chat.tools"]


def test_prefill_knows_the_tokens_that_end_an_answer() -> None:
    """With min_tokens or a grammar, they matter for the first token."""
    worker = SimpleNamespace(ref=WorkerRef("d", "1"), endpoint="d:1")
    request = decode_pb2.GenerateRequest(stop_token_ids=[9])
    token_ids = inference_pb2.TokenIds(ids=[1, 2])
    decision: Any = SimpleNamespace(worker=worker)
    task = prefill_task(
        request,
        token_ids,
        decision,
        start_token=0,
        end_token=2,
        first_token=BY_PREFILL,
        traceparent="",
    )
    assert list(task.token_ids) == [1, 2]
    assert list(task.sampling.stop_token_ids) == [9]
