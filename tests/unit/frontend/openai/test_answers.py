"""Reasoning and tool calls in answers to chats, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.inference.v1 import sampling_pb2, tools_pb2
from tests.kit.openai_app import LocalApp, Reply

STOP = sampling_pb2.FINISH_REASON_STOP
LENGTH = sampling_pb2.FINISH_REASON_LENGTH
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "f"}}
ANSWER = (
    '<think>why</think>So.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "g"}</tool_call>'
)


async def answered(
    texts: Sequence[str],
    *,
    reason: Any = STOP,
    tool_calls: str = "hermes",
    reasoning: str = "qwen3",
    **fields: Any,
) -> Reply:
    """The answer to a chat by a model that generates these texts."""
    app = LocalApp(reasoning=reasoning, tool_calls=tool_calls, texts=texts)
    app.runner.last.finish_reason = reason
    return await app.chat(**{"tools": TOOLS, **fields})


async def streamed(texts: Sequence[str], **given: Any) -> tuple[dict[str, Any], str | None, int]:
    """The message that a client puts together, the finish reason, and the number of events with some of it."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    finish_reason, events = None, 0
    for event in (await answered(texts, stream=True, **given)).events[1:]:
        events += 1
        (choice,) = event["choices"]
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


async def whole(text: str, **given: Any) -> dict[str, Any]:
    """The choice of an answer that is not streamed."""
    (choice,) = (await answered([text], **given)).json["choices"]
    found: dict[str, Any] = choice
    return found


async def test_deltas_make_the_same_message() -> None:
    expected = {
        "content": "So.",
        "reasoning_content": "why",
        "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}],
    }
    message, reason, events = await streamed(list(ANSWER))
    assert (message, reason) == (expected, "tool_calls")
    # Tags and parts of them are no events.
    assert events < len(ANSWER) / 2
    assert (await streamed([ANSWER]))[:2] == (expected, "tool_calls")


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
async def test_a_call_that_is_cut_or_no_json_is_text(
    fields: dict[str, Any], text: str, reason: Any, expected: str
) -> None:
    given = {"reason": reason, "reasoning": "", **fields}
    choice = await whole(text, **given)
    message = choice["message"]
    assert ("tool_calls" in message, message["content"]) == (False, text)
    assert choice["finish_reason"] == expected
    # What was streamed cannot be taken back, but the end does not name it a call.
    assert (await streamed([text], **given))[1] == expected


async def test_reasoning_has_both_names_and_may_be_left_out() -> None:
    message = (await whole(ANSWER))["message"]
    assert message["reasoning"] == message["reasoning_content"] == "why"
    message = (await whole(ANSWER, include_reasoning=False))["message"]
    assert ("reasoning" in message, message["content"]) == (False, "So.")
    assert "reasoning_content" not in (await streamed(list(ANSWER), include_reasoning=False))[0]


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>why</think>So.", "why"),
        # The tag has these letters, too.
        (" <think>hi</think>So.", "hi"),
        ("why</think>So.", "why"),
        ("<think></think>hi", ""),
        ("<think>hi", "hi"),
        ("why", "why"),
        ("So.", ""),
    ],
)
@pytest.mark.parametrize("hidden", [True, False])
async def test_the_tokens_of_reasoning_are_counted(text: str, reasoning: str, hidden: bool) -> None:
    fields: dict[str, Any] = {"tools": None, "include_reasoning": not hidden}
    if text == "So.":
        fields["response_format"] = {"type": "json_object"}
    details = {"reasoning_tokens": len(reasoning)}
    reply = await answered([text], **fields)
    assert reply.json["usage"]["completion_tokens_details"] == details
    reply = await answered([text], stream=True, stream_options={"include_usage": True}, **fields)
    assert reply.events[-1]["usage"]["completion_tokens_details"] == details


async def test_functions_are_answered_in_their_own_form() -> None:
    older: dict[str, Any] = {"tools": None, "functions": [{"name": "f"}, {"name": "g"}]}
    choice = await whole(ANSWER, **older)
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert choice["message"]["function_call"] == function
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    sent = {"name": "", "arguments": ""}
    for event in (await answered(list(ANSWER), stream=True, **older)).events:
        for name, value in event["choices"][0]["delta"].get("function_call", {}).items():
            sent[name] += value
    assert sent == function


async def test_required_calls_are_read_from_json() -> None:
    without: dict[str, Any] = {"tool_calls": "", "reasoning": ""}
    text = '[{"name": "f", "parameters": {"a": 1}}]'
    choice = await whole(text, tool_choice="required", **without)
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"
    named = await whole('{"a": 2}', tool_choice=NAMED, **without)
    assert named["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 2}'}
    assert named["finish_reason"] == "stop"


async def test_one_call_can_be_asked_for() -> None:
    message = (await whole(ANSWER, parallel_tool_calls=False))["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


async def test_ids_have_the_form_of_the_model() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    message = (await whole(text, tool_calls="mistral", reasoning=""))["message"]
    assert len(message["tool_calls"][0]["id"]) == 9
    kimi = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    message = (await whole(kimi, tool_calls="kimi_k2", reasoning=""))["message"]
    assert message["tool_calls"][0]["id"] == "functions.f:0"


async def test_without_tools_only_reasoning_is_apart() -> None:
    message = (await whole(ANSWER, tools=None))["message"]
    assert message["reasoning_content"] == "why"
    assert message["content"] == ANSWER.partition("</think>")[2]
    assert (await whole(ANSWER, tools=None, reasoning=""))["message"]["content"] == ANSWER
    assert "tool_calls" not in (await whole(ANSWER, tool_choice="none"))["message"]


async def test_the_model_decides_about_calls_only_with_a_parser() -> None:
    for automatic in (None, "auto"):
        reply = await answered(["x"], tool_calls="", tool_choice=automatic)
        assert reply.status == 400
        assert "tool_call_parser" in reply.error["message"]
    for decided in ("none", "required", NAMED):
        assert (await answered(["x"], tool_calls="", tool_choice=decided)).status == 200


@pytest.mark.parametrize("nested", [False, True])
async def test_only_allowed_tools_are_in_the_prompt(nested: bool) -> None:
    given = {"mode": "required", "tools": [{"type": "function", "name": "g"}]}
    choice = {"type": "allowed_tools", **({"allowed_tools": given} if nested else given)}
    (request,) = (await answered(["[]"], tool_choice=choice)).requests
    assert [tool.name for tool in request.chat.tools] == ["g"]
    assert request.chat.tool_choice.mode == tools_pb2.ToolChoice.MODE_REQUIRED
    tools = [{"type": "function", "name": name} for name in ("f", "g")]
    body = {"input": "x", "tools": tools, "tool_choice": {"type": "allowed_tools", **given}}
    (request,) = (await LocalApp().post("/v1/responses", body)).requests
    assert [tool.name for tool in request.chat.tools] == ["g"]


async def test_another_role_is_accepted() -> None:
    reply = await answered(["x"], messages=[{"role": "judge", "content": "x"}])
    assert (reply.status, reply.requests[0].chat.messages[0].role) == (200, "judge")


async def test_a_form_permits_calls_and_a_forced_call_overrides_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = await answered(["x"], response_format=form)
    grammar = reply.prepared[0].sampling.structured_outputs.grammar
    assert "form: %json" in grammar
    assert '"<tool_call>"' in grammar
    for choice, json_schema in (("none", schema), (NAMED, {"type": "object", "properties": {}})):
        (prepared,) = (await answered(["x"], response_format=form, tool_choice=choice)).prepared
        assert json.loads(prepared.sampling.structured_outputs.json) == json_schema
    reply = await answered(["x"], structured_outputs={"json": "["})
    assert reply.error["param"] == "structured_outputs.json"
