"""Bodies of OpenAI requests: what they become, and what each wrong one is rejected with."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.errors import InvalidRequest
from headrace_router.openai.conversion import (
    chat_requests,
    completion_requests,
    openai_violations,
    tokenize_request,
)
from headrace_router.openai.requests import (
    ChatCompletionBody,
    CompletionBody,
    TokenizeBody,
    parse_body,
)

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
    (request,) = chat_requests(body, "r1")
    assert [(one.role, one.content) for one in request.chat.messages] == [
        ("system", "be brief"),
        ("user", "ab"),
        ("assistant", ""),
    ]
    sampling = request.sampling
    assert (request.model, request.request_id) == ("m", "r1")
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (5, 1.0, 7)
    assert (sampling.HasField("top_k"), sampling.top_k) == (True, 0)
    assert (list(sampling.stop), sampling.logprobs) == (["end"], 2)


def test_fields_that_are_left_out_stay_unset() -> None:
    (request,) = chat_requests(chat(), "r1")
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


def test_choices_have_their_own_seeds_and_ids() -> None:
    requests = chat_requests(chat(n=3, seed=2**63 - 1), "r1")
    assert [one.sampling.seed for one in requests] == [2**63 - 1, 0, 1]
    assert [one.request_id for one in requests] == ["r1", "r1-1", "r1-2"]
    assert not any(one.sampling.HasField("seed") for one in chat_requests(chat(n=2), "r1"))


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [
        ({"max_token": 5}, "max_token", "is not a field of this request"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [USER] * 2_049}, "messages", "at most 2048"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", "valid string"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0]", "tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "greater than or equal to 0"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "'none'"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias", "not supported"),
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
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert field in caught.value.violations


def test_a_body_that_is_no_json_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="body: Invalid JSON"):
        parse_body(CompletionBody, b'{"prompt": ')


def test_violations_are_few_however_many_fields_are_wrong() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{f"field_{number}": 1 for number in range(1_000)})
    assert len(caught.value.violations) == 16


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


def test_violations_have_the_names_of_openai_fields() -> None:
    violations = {
        "sampling.max_tokens": "a",
        "sampling.stop[1]": "b",
        "chat.messages[0].role": "c",
        "sampling.logprobs": "d",
        "text": "e",
        "model": "f",
    }
    assert openai_violations(violations, chat=True) == {
        "max_completion_tokens": "a",
        "stop[1]": "b",
        "messages[0].role": "c",
        "top_logprobs": "d",
        "prompt": "e",
        "model": "f",
    }
    assert openai_violations({"tokens.ids[3]": "x"}, chat=False) == {"prompt[3]": "x"}
