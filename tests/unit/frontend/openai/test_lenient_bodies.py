"""What clients of OpenAI and of its peers send: null, neutral values, other names, and fields that are unknown here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_frontend.openai.body import UnknownFields
from headrace_frontend.openai.conversion import chat_request, completion_requests
from headrace_frontend.request.validation import request_violations
from tests.unit.frontend.openai.test_requests import USER, WEATHER, chat, completion


def test_unknown_fields_are_named_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part, part], "id": "m1", "cache_control": {}}
    tool = {"type": "function", "function": {**WEATHER, "defer_loading": True}}
    body = chat(messages=[message, message], tools=[tool], verbosity="low", **{"a\r\nb": 1})
    expected = [
        "a__b",
        "messages.cache_control",
        "messages.content.cache_control",
        "messages.id",
        "tools.function.defer_loading",
        "verbosity",
    ]
    unknown = UnknownFields(rejected=False)
    for _ in range(2):
        assert unknown.check(body) == expected
    assert len(caplog.records) == len(expected)
    assert "field verbosity, which is ignored" in caplog.text
    assert unknown.check(chat(user="u", store=True, seed=None, unheard_of=None)) == []
    many = chat(**{f"field_{number}": 1 for number in range(1_000)})
    assert len(unknown.check(many)) == 16


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_grammar", "grammar"),
        ("regex", "regex"),
        ("ebnf", "grammar"),
        ("json_schema", "json"),
    ],
)
def test_constraints_by_other_names_are_kept(name: str, kind: str) -> None:
    for body in (chat(**{name: "{}"}), completion(**{name: "{}"})):
        assert body.structured_outputs is not None
        assert body.structured_outputs.model_dump(exclude_none=True, by_alias=True) == {kind: "{}"}
    sampling = chat_request(chat(guided_choice=["a"]), "r1").sampling
    assert list(sampling.structured_outputs.choice.texts) == ["a"]


def test_neutral_values_and_null_are_those_that_are_left_out() -> None:
    neutral: dict[str, Any] = {
        "seed": -1,
        "stream": None,
        "model": None,
        "n": None,
        "top_k": None,
        "echo": False,
        "stop": [],
        "stop_token_ids": [],
        "logit_bias": {},
        "use_beam_search": False,
        "length_penalty": 1.0,
        "kv_transfer_params": None,
        "stream_options": {},
        "priority": 0.0,
        "response_format": {"type": "text", "json_schema": None},
        "truncate_prompt_tokens": None,
        "cache_salt": None,
    }
    more = {"top_logprobs": 0, "tools": None, "tool_choice": None, "parallel_tool_calls": None}
    message = {**USER, "name": None, "tool_calls": None, "audio": None, "function_call": None}
    body = chat(messages=[message], **neutral, **more)
    assert chat_request(body, "r1") == chat_request(chat(), "r1")
    assert UnknownFields(rejected=True).check(body) == []
    prompted = completion(**neutral, suffix="", best_of=None, max_tokens=None)
    assert completion_requests(prompted, "r1") == completion_requests(completion(), "r1")


def test_whole_numbers_may_have_a_fraction_of_zero() -> None:
    sampling = chat_request(
        chat(max_tokens=2.0, top_k=3.0, seed=-7.0, min_tokens=1.0), "r"
    ).sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.min_tokens) == (2, 3, 1)
    assert sampling.seed == 2**63 - 7


def test_a_completion_has_sixteen_tokens_unless_it_says_otherwise() -> None:
    for fields, count in (({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 5}, 5)):
        (request,) = completion_requests(completion(**fields), "r1")
        assert request.sampling.max_tokens == count


def test_messages_of_older_and_other_clients_are_understood() -> None:
    parts = [
        "plain",
        {"text": "no type"},
        {"type": "refusal", "refusal": "no"},
        {"type": "output_text", "text": "out", "annotations": []},
        {"type": "thinking", "thinking": "hm"},
    ]
    call = {"name": "weather", "arguments": "{}"}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    request = chat_request(chat(messages=messages), "r1")
    user, assistant, result = request.chat.messages
    assert user.content == "plain\nno type\nno\nout\nhm"
    assert [(one.name, one.arguments) for one in assistant.tool_calls] == [("weather", "{}")]
    assert (result.role, result.name, result.content) == ("tool", "weather", "rain")
    assert request_violations(request) == {}


def test_ids_of_several_prompts_are_never_too_long() -> None:
    requests = completion_requests(completion(prompt=["a", "b"]), "r" * 128)
    assert [len(one.request_id) for one in requests] == [128, 128]
    assert requests[1].request_id.endswith("r-1")
    assert not any(map(request_violations, requests))


def test_a_structural_tag_may_be_the_response_format() -> None:
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    (request,) = completion_requests(completion(response_format=tag), "r1")
    assert json.loads(request.sampling.structured_outputs.structural_tag) == tag
