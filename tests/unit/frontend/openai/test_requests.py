"""Bodies of OpenAI requests: what they become, and what each wrong one is rejected with."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.inference.v1 import sampling_pb2, tools_pb2
from headrace_common.errors import InvalidRequest
from headrace_frontend.openai.body import checked_body, parse_body
from headrace_frontend.openai.conversion import (
    chat_request,
    completion_requests,
    openai_error,
    tokenize_request,
)
from headrace_frontend.openai.requests import ChatCompletionBody, CompletionBody, TokenizeBody
from headrace_frontend.request.validation import request_violations

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatCompletionBody:
    return parse_body(ChatCompletionBody, json.dumps({"messages": [USER], **fields}).encode())


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "hi", **fields}).encode())


def test_a_chat_becomes_one_request_with_its_sampling() -> None:
    body = chat(
        model="m",
        messages=[
            {"role": "system", "content": "be brief", "name": "operator"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None},
        ],
        max_tokens=3,
        max_completion_tokens=5,
        temperature=1,
        top_k=-1,
        stop="end",
        seed=7,
        logprobs=True,
        top_logprobs=2,
        user="somebody",
        metadata={"a": "b"},
    )
    request = chat_request(body, "r1")
    assert [(one.role, one.content) for one in request.chat.messages] == [
        ("system", "be brief"),
        ("user", "a\nb"),
        ("assistant", ""),
    ]
    sampling = request.sampling
    assert (request.model, request.request_id) == ("m", "r1")
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (5, 1.0, 7)
    assert (sampling.HasField("top_k"), sampling.top_k) == (True, 0)
    assert (list(sampling.stop), sampling.logprobs) == (["end"], 2)


def test_fields_that_are_left_out_stay_unset() -> None:
    request = chat_request(chat(), "r1")
    assert request.sampling.ListFields() == []


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("a", [("text", "a")]),
        (["a", "b"], [("text", "a"), ("text", "b")]),
        ([1, 2], [("tokens", [1, 2])]),
        ([[1], [2, 3]], [("tokens", [1]), ("tokens", [2, 3])]),
    ],
)
def test_each_prompt_of_a_completion_becomes_a_request(prompt: Any, fields: Any) -> None:
    requests = completion_requests(completion(prompt=prompt), "r1")
    seen = [
        ("text", one.text) if one.HasField("text") else ("tokens", list(one.tokens.ids))
        for one in requests
    ]
    assert seen == fields


@pytest.mark.parametrize(
    ("fields", "prompt_logprobs"),
    [
        ({"echo": True}, None),
        ({"logprobs": 3}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 0}, 0),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 0, "stream": True}, 3),
        ({"prompt_logprobs": 2}, 2),
        ({"prompt_logprobs": 0, "stream": True}, None),
    ],
)
def test_an_echo_with_logprobs_asks_for_those_of_the_prompt(
    fields: dict[str, Any], prompt_logprobs: int | None
) -> None:
    (request,) = completion_requests(completion(**fields), "r1")
    sampling = request.sampling
    found = sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None
    assert found == prompt_logprobs
    if not fields.get("echo"):
        sampling = chat_request(chat(**fields | {"logprobs": None}), "r1").sampling
        assert sampling.HasField("prompt_logprobs") == (prompt_logprobs is not None)


def test_an_echo_without_an_answer_runs_for_one_token() -> None:
    (request,) = completion_requests(completion(echo=True, max_tokens=0), "r1")
    assert request.sampling.max_tokens == 1
    (request,) = completion_requests(completion(max_tokens=0), "r1")
    assert request.sampling.max_tokens == 0


def test_choices_are_left_to_the_runner() -> None:
    (request,) = completion_requests(completion(n=2, best_of=3), "r1")
    assert (request.n, request.best_of) == (2, 3)


WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


def test_tools_and_calls_become_those_of_the_contract() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    body = chat(
        messages=[
            USER,
            # As the official client sends back a message that it received.
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "assistant", "content": "So.", "reasoning_content": "why"},
        ],
        tools=[{"type": "function", "function": WEATHER}],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
    )
    request = chat_request(body, "r1").chat
    (tool,) = request.tools
    assert (tool.name, tool.description, tool.strict) == ("weather", "The weather", True)
    assert json.loads(tool.parameters) == WEATHER["parameters"]
    (sent,) = request.messages[1].tool_calls
    assert (sent.id, sent.name, sent.arguments) == ("c1", "weather", "{}")
    assert request.messages[2].tool_call_id == "c1"
    assert request.messages[3].reasoning == "why"
    assert request.tool_choice.mode == tools_pb2.ToolChoice.MODE_REQUIRED
    assert request.tool_choice.single_call
    variables = {"reasoning_effort": "low", "enable_thinking": False}
    assert json.loads(request.template_kwargs) == variables
    assert request_violations(chat_request(body, "r1")) == {}


def test_a_named_function_is_a_choice() -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    body = chat(tools=[{"type": "function", "function": WEATHER}], tool_choice=choice)
    request = chat_request(body, "r1").chat
    assert request.tool_choice.function_name == "weather"
    assert not chat_request(chat(tool_choice="none"), "r1").chat.HasField("tool_choice")
    older = chat(functions=[WEATHER], function_call={"name": "weather"})
    assert chat_request(older, "r1").chat == request
    assert chat_request(chat(functions=[WEATHER], function_call="none"), "r1").chat.tools


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            "json",
            '{"a": 1}',
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, "json", '{"a": 1}'),
        ({"structured_outputs": {"json": "{}"}}, "json", "{}"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", sampling_pb2.Choice(texts=["a"])),
        ({"response_format": {"type": "text"}}, None, None),
    ],
)
def test_the_form_of_the_answer_is_a_constraint(
    fields: dict[str, Any], kind: Any, value: Any
) -> None:
    outputs = chat_request(chat(**fields), "r1").sampling.structured_outputs
    assert outputs.WhichOneof("constraint") == kind
    assert kind is None or getattr(outputs, kind) == value


def test_two_constraints_are_rejected() -> None:
    body = chat(structured_outputs={"regex": "a", "choice": ["b"]})
    with pytest.raises(InvalidRequest, match="only one of regex and choice"):
        chat_request(body, "r1")


def test_the_bias_of_tokens_is_kept() -> None:
    body = chat(logit_bias={"5": -100, "7": 1.5}, min_tokens=2, bad_words=["x"])
    sampling = chat_request(body, "r1").sampling
    assert dict(sampling.logit_bias) == {5: -100.0, 7: 1.5}
    assert (sampling.min_tokens, list(sampling.bad_words)) == (2, ["x"])


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [USER] * 2_049}, "messages", "at most 2048"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", "must be a text"),
        (
            {"messages": [{**USER, "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
            "is missing",
        ),
        ({"messages": [{**USER, "audio": {"id": "a"}}]}, "messages[0].audio", "not supported"),
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tools": []}, "tools", "at least 1"),
        ({"function_call": "auto"}, "tool_choice", "needs tools"),
        ({"functions": [], "tools": []}, "functions", "leave one out"),
        ({"guided_json": {}, "structured_outputs": {"json": {}}}, "guided_json", "leave one out"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        (
            {"structured_outputs": {"whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern",
            "not",
        ),
        ({"max_tokens": 2.5}, "max_tokens", "must be an integer"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
            "'input_audio' is not supported; send parts of type 'text' and 'image_url'",
        ),
        *(
            (
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "image_url", "image_url": image}]}
                    ]
                },
                f"messages[0].content[0].image_url{field}",
                remedy,
            )
            for image, field, remedy in (
                ({}, ".url", "is missing"),
                (None, "", "is missing"),
                ("data:image/png,x", ".url", "must be data:image/...;base64"),
                ("data:image/png;base64,", ".url", "no file in base64"),
                ("data:image/png;base64,A", ".url", "no file in base64"),
                ("data:video/mp4;base64,AAAA", ".url", "'video/mp4' is not supported"),
            )
        ),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "must be 0 or more"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"n": 129}, "n", "must be 128 or less"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tool_choice": "any"}, "tool_choice", "'required'"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "needs schema",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
            "structured_outputs",
            "leave one out",
        ),
        ({"logit_bias": {"word": 1.0}}, "logit_bias", "'word' is no token id"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "must be 0 or more"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=false"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "continue_final_message"),
        ({"stop": ["x"] * 65}, "stop", "at most 64"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named_with_its_remedy(
    fields: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert remedy in caught.value.violations[field]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"echo": "x"}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 128}, "n"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert field in caught.value.violations


def test_a_body_that_is_no_json_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="body: is no JSON"):
        parse_body(CompletionBody, b'{"prompt": ')


def test_violations_are_few_however_many_fields_are_wrong() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[USER] * 3, stop=[1], n=0, tools=[{}], **dict.fromkeys(NUMBERS, "x"))
    assert 10 < len(caught.value.violations) <= 16


NUMBERS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed"),
    *("frequency_penalty", "repetition_penalty", "min_tokens", "ttft_target_s", "timeout_s"),
    "tpot_target_s",
    *(
        "top_logprobs",
        "max_completion_tokens",
        "priority",
        "stream",
        "logprobs",
        "ignore_eos",
        "cache_salt",
    ),
)


@settings(max_examples=40, deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["messages", "prompt", "role", "content", "n", "stop"]), inner
            )
        ),
        max_leaves=10,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_a_body_or_an_invalid_request(data: bytes) -> None:
    for kind in (ChatCompletionBody, CompletionBody, TokenizeBody):
        with contextlib.suppress(InvalidRequest):
            parse_body(kind, data)


def test_tokenize_takes_one_prompt() -> None:
    assert tokenize_request(TokenizeBody(prompt="x")).text == "x"
    for body in (TokenizeBody(), TokenizeBody(prompt="x", messages=[USER])):  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="one of prompt and messages"):
            tokenize_request(body)


def test_a_part_that_is_no_text_is_the_only_violation() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}])
    assert list(caught.value.violations) == ["messages[0].content[0].type"]


@pytest.mark.parametrize("kind", [ChatCompletionBody, TokenizeBody])
def test_an_answer_cannot_begin_and_continue_a_message(
    kind: type[ChatCompletionBody | TokenizeBody],
) -> None:
    fields = {"messages": [USER], "continue_final_message": True}
    assert checked_body(kind, fields).continue_final_message
    with pytest.raises(InvalidRequest, match="add_generation_prompt=false; leave one out"):
        checked_body(kind, {**fields, "add_generation_prompt": True})


def test_violations_have_the_names_of_openai_fields() -> None:
    names = {
        "sampling.max_tokens": "max_tokens",
        "sampling.stop[1]": "stop_sequences[1]",
        "chat.messages[0].role": "messages[0].role",
        "sampling.logprobs": "top_logprobs",
        "text": "prompt",
        "model": "model",
        "chat.tools[1].parameters": "tools[1].function.parameters",
        "chat.tool_choice.function_name": "tool_choice",
        "chat.template_kwargs": "chat_template_kwargs",
        "chat.messages[2].tool_calls[0].name": "messages[2].tool_calls[0].function.name",
        "sampling.structured_outputs.choice.texts[3]": "structured_outputs.choice[3]",
        "sampling.structured_outputs.json": "response_format.json_schema.schema",
        "tokens.ids[3]": "prompt[3]",
    }
    for name, openai_name in names.items():
        error = openai_error(
            InvalidRequest({name: "remedy"}),
            chat=True,
            formatted=True,
            renamed={"stop": "stop_sequences"},
        )
        assert error.violations == {openai_name: "remedy"}
