"""Reasoning and tool calls in responses to chats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import InvalidRequest
from headrace_frontend.openai.answers import AnswerRules, ChatAnswer, ModelParsers, rules_of
from headrace_frontend.openai.body import parse_body
from headrace_frontend.openai.requests import ChatCompletionBody, Includes
from headrace_frontend.openai.responses import (
    DONE_EVENT,
    ChatFormat,
    CollectedChoice,
    ResponseHead,
)
from headrace_text.load import ByteCodec

STOP = sampling_pb2.FINISH_REASON_STOP
UNSPECIFIED = sampling_pb2.FINISH_REASON_UNSPECIFIED
LENGTH = sampling_pb2.FINISH_REASON_LENGTH
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "f"}}
ANSWER = (
    '<think>why</think>So.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "g"}</tool_call>'
)
PARSERS = ModelParsers("hermes", "qwen3")


def body_of(**fields: Any) -> ChatCompletionBody:
    data = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    return parse_body(ChatCompletionBody, json.dumps(data).encode())


def rules(parsers: ModelParsers = PARSERS, **fields: Any) -> AnswerRules:
    return rules_of(body_of(**fields), parsers)


def chat_format(answer_rules: AnswerRules) -> ChatFormat:
    head = ResponseHead("id", 1, "m")
    return ChatFormat(head, ByteCodec(), rules=answer_rules)


def streamed(
    answer_rules: AnswerRules, parts: Sequence[str], reason: Any = STOP
) -> tuple[dict[str, Any], str | None, int]:
    """The message that a client puts together, the finish reason, and the number of events."""
    form = chat_format(answer_rules)
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    finish_reason, events = None, 0
    for number, part in enumerate(parts):
        last = reason if number == len(parts) - 1 else UNSPECIFIED
        event = form.event(0, inference_pb2.GenerateResponse(text=part, finish_reason=last))
        if not event:
            continue
        events += 1
        (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
        finish_reason = choice["finish_reason"]
        for name in ("content", "reasoning_content"):
            if name in choice["delta"]:
                message[name] = message.get(name, "") + choice["delta"][name]
        for delta in choice["delta"].get("tool_calls", ()):
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append({"name": delta["function"]["name"], "arguments": ""})
            calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return message, finish_reason, events


def whole(answer_rules: AnswerRules, text: str, reason: Any = STOP) -> dict[str, Any]:
    choice = CollectedChoice()
    choice.add(inference_pb2.GenerateResponse(text=text, finish_reason=reason), [])
    parsed: dict[str, Any] = json.loads(chat_format(answer_rules).whole([choice], 1))
    found: dict[str, Any] = parsed["choices"][0]
    return found


def test_deltas_make_the_same_message() -> None:
    expected = {
        "content": "So.",
        "reasoning_content": "why",
        "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}],
    }
    message, reason, events = streamed(rules(), list(ANSWER))
    assert (message, reason) == (expected, "tool_calls")
    # Tags and parts of them are no events.
    assert events < len(ANSWER) / 2
    assert streamed(rules(), [ANSWER])[:2] == (expected, "tool_calls")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, '<tool_call>{"name": "f", "arguments": {"a": '),
        ({}, '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>'),
        ({}, '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {'),
        ({"tool_choice": NAMED}, "{"),
        ({"tool_choice": "required"}, '[{"name": "f", "parameters": {"a": '),
    ],
)
@pytest.mark.parametrize(("reason", "expected"), [(LENGTH, "length"), (STOP, "stop")])
def test_a_call_that_is_cut_or_no_json_is_text(
    fields: dict[str, Any], text: str, reason: Any, expected: str
) -> None:
    choice = whole(rules(ModelParsers("hermes"), **fields), text, reason)
    message = choice["message"]
    assert ("tool_calls" in message, message["content"]) == (False, text)
    assert choice["finish_reason"] == expected
    # What was streamed cannot be taken back, but the end does not name it a call.
    assert streamed(rules(ModelParsers("hermes"), **fields), [text], reason)[1] == expected


def test_reasoning_has_both_names_and_may_be_left_out() -> None:
    message = whole(rules(), ANSWER)["message"]
    assert message["reasoning"] == message["reasoning_content"] == "why"
    hidden = rules(include_reasoning=False)
    message = whole(hidden, ANSWER)["message"]
    assert ("reasoning" in message, message["content"]) == (False, "So.")
    assert "reasoning_content" not in streamed(hidden, list(ANSWER))[0]


@pytest.mark.parametrize("text", ["<think>why</think>So.", "why</think>So.", "why", "So."])
@pytest.mark.parametrize("hidden", [True, False])
def test_the_tokens_of_reasoning_are_counted(text: str, hidden: bool) -> None:
    expected = 3 if "why" in text else 0
    fields: dict[str, Any] = {} if "why" in text else {"response_format": {"type": "json_object"}}
    answer_rules = rules(tools=None, include_reasoning=not hidden, **fields)
    sent = inference_pb2.GenerateResponse(
        text=text, token_ids=list(text.encode()), finish_reason=STOP
    )
    choice = CollectedChoice()
    choice.add(sent, [])
    form = ChatFormat(
        ResponseHead("id", 1, "m"), ByteCodec(), includes=Includes(usage=True), rules=answer_rules
    )
    details = {"reasoning_tokens": expected}
    assert json.loads(form.whole([choice], 1))["usage"]["completion_tokens_details"] == details
    form.event(0, sent)
    usage = json.loads(
        form.last_event([sent.usage], 1).removeprefix(b"data: ").removesuffix(DONE_EVENT)
    )["usage"]
    assert usage["completion_tokens_details"] == details


@pytest.mark.parametrize(
    ("text", "start", "reasoning"),
    [
        # The tag has these letters, too.
        (" <think>hi</think>So.", 8, "hi"),
        ("hi</think>So.", 0, "hi"),
        ("<think></think>hi", 7, ""),
        ("<think>hi", 7, "hi"),
    ],
)
def test_reasoning_is_found_where_it_stands(text: str, start: int, reasoning: str) -> None:
    found = ChatAnswer(rules(tools=None)).reasoning_in(text)
    assert (found.start, text[found.start : found.stop]) == (start, reasoning)
    assert not ChatAnswer(AnswerRules()).reasoning_in(text)


def test_functions_are_answered_in_their_own_form() -> None:
    older = rules(tools=None, functions=[{"name": "f"}, {"name": "g"}])
    choice = whole(older, ANSWER)
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert (choice["message"]["function_call"], choice["finish_reason"]) == (
        function,
        "function_call",
    )
    assert "tool_calls" not in choice["message"]
    form, sent = chat_format(older), {"name": "", "arguments": ""}
    for part in ANSWER:
        event = form.event(0, inference_pb2.GenerateResponse(text=part))
        delta = json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"] if event else {}
        for name, value in delta.get("function_call", {}).items():
            sent[name] += value
    assert sent == function


def test_required_calls_are_read_from_json() -> None:
    text = '[{"name": "f", "parameters": {"a": 1}}]'
    required = rules(ModelParsers(), tool_choice="required")
    choice = whole(required, text)
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"
    named = whole(rules(ModelParsers(), tool_choice=NAMED), '{"a": 2}')
    assert named["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 2}'}
    assert named["finish_reason"] == "stop"


def test_one_call_can_be_asked_for() -> None:
    message = whole(rules(parallel_tool_calls=False), ANSWER)["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


def test_ids_have_the_form_of_the_model() -> None:
    mistral = ModelParsers("mistral")
    message = whole(rules(mistral), '[TOOL_CALLS][{"name": "f", "arguments": {}}]')["message"]
    assert len(message["tool_calls"][0]["id"]) == 9
    kimi = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    message = whole(rules(ModelParsers("kimi_k2")), kimi)["message"]
    assert message["tool_calls"][0]["id"] == "functions.f:0"


def test_without_tools_only_reasoning_is_apart() -> None:
    message = whole(rules(tools=None), ANSWER)["message"]
    assert message["reasoning_content"] == "why"
    assert message["content"] == ANSWER.partition("</think>")[2]
    plain = rules(ModelParsers("hermes"), tools=None)
    assert not plain.divides
    assert whole(plain, ANSWER)["message"]["content"] == ANSWER
    assert "tool_calls" not in whole(rules(tool_choice="none"), ANSWER)["message"]


def test_the_model_decides_about_calls_only_with_a_parser() -> None:
    for automatic in (None, "auto"):
        with pytest.raises(InvalidRequest, match="tool_call_parser"):
            rules(ModelParsers(), tool_choice=automatic)
    for decided in ("none", "required", NAMED):
        rules(ModelParsers(), tool_choice=decided)
