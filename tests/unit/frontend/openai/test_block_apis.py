"""/v1/messages and /v1/responses: the chats that requests ask for, and answers as blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import TypeAdapter

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import InvalidRequest, QueueFull
from headrace_frontend.openai.answers import AnswerRules
from headrace_frontend.openai.block_apis.anthropic import MessagesBody
from headrace_frontend.openai.block_apis.responses_answers import ResponsesFormat
from headrace_frontend.openai.block_apis.responses_bodies import ResponsesBody
from headrace_frontend.openai.body import checked_body, parse_body
from headrace_frontend.openai.event_stream import EventStream
from headrace_frontend.openai.requests import ChatCompletionBody
from headrace_frontend.openai.responses import ResponseHead
from headrace_text.load import ByteCodec
from tests.kit.openai_app import LocalApp, Reply, Request

TEXTS = (
    "<think>hm",
    "m</think>I look",
    ' it up.<tool_call>{"name": "find", "arguments": ',
    '{"what": "Paris"}}</tool_call>',
)
STOP = sampling_pb2.FINISH_REASON_STOP
LENGTH = sampling_pb2.FINISH_REASON_LENGTH
LAST: dict[str, Any] = {
    "finish_reason": STOP,
    "usage": inference_pb2.Usage(cached_tokens=16, stored_tokens=112),
}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "messages": [{"role": "user", "content": "x" * 14}],
        "max_tokens": 99,
        "tools": [{"name": "find", "input_schema": {"type": "object"}}],
    },
    "/v1/responses": {
        "input": "x" * 14,
        "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
    },
}

CLAUDE_CODE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32_000,
    "stream": True,
    "metadata": {"user_id": "user_1_session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "system": [
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "List files."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I call it.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "a.py"}],
                    "is_error": False,
                },
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [
        {"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "context_management": {"edits": []},
}
CODEX: dict[str, Any] = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "List files."}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "I call it."}],
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "name": "Bash",
            "arguments": '{"command": "ls"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "Bash",
            "description": "Runs.",
            "strict": False,
            "parameters": {"type": "object"},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
}
TURN: dict[str, Any] = {
    "role": "assistant",
    "content": "I look.",
    "reasoning": "I call it.",
    "tool_calls": [
        {
            "id": "toolu_1",
            "type": "function",
            "function": {"name": "Bash", "arguments": '{"command": "ls"}'},
        }
    ],
}


async def answered(
    path: str, texts: Sequence[str], *, reasoning: str = "deepseek_r1", **fields: Any
) -> Reply:
    """The answer of an API by a model that generates these texts. Fields of the last message have their own names."""
    app = LocalApp(reasoning=reasoning, texts=texts)
    last = dict(LAST)
    for name in fields.keys() & {"finish_reason", "stop_text"}:
        last[name] = fields.pop(name)
    app.runner.last = inference_pb2.GenerateResponse(**last)
    return await app.post(path, {**ASKED[path], **fields})


async def streamed(path: str, texts: Sequence[str], **given: Any) -> list[dict[str, Any]]:
    return (await answered(path, texts, stream=True, **given)).named_events


def test_a_request_of_claude_code_is_a_chat() -> None:
    body = parse_body(MessagesBody, json.dumps(CLAUDE_CODE).encode())
    chat = body.chat
    assert chat["messages"] == [
        {"role": "system", "content": "You are a coding agent.\nBe brief."},
        {"role": "user", "content": "List files."},
        TURN,
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a.py"},
        {"role": "user", "content": "And now?"},
    ]
    checked = checked_body(ChatCompletionBody, chat)
    assert [tool.function.name for tool in checked.tools or ()] == ["Bash"]
    assert (checked.tool_choice, checked.parallel_tool_calls) == ("auto", False)
    assert checked.template_variables == {"enable_thinking": True}
    assert body.stream


def test_a_request_of_codex_is_a_chat() -> None:
    body = parse_body(ResponsesBody, json.dumps(CODEX).encode())
    chat = body.chat
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List files."},
        TURN | {"content": "", "tool_calls": [TURN["tool_calls"][0] | {"id": "call_1"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
        {"role": "user", "content": "And now?"},
    ]
    checked = checked_body(ChatCompletionBody, chat)
    assert [tool.function.name for tool in checked.tools or ()] == ["Bash"]
    assert checked.template_variables == {"reasoning_effort": "medium"}


async def test_functions_of_a_namespace_have_one_name_for_the_model() -> None:
    """Coding agents send the tools of their MCP servers so."""
    one = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    call = {"type": "function_call", "call_id": "call_1", "arguments": "{}"}
    items = [{"role": "user", "content": "?"}, call | {"namespace": "notes", "name": "find"}]
    tools = [
        {"type": "namespace", "name": "notes", "tools": [one, {"type": "custom", "name": "x"}]},
        one,
    ]
    body = parse_body(ResponsesBody, json.dumps({"input": items, "tools": tools}).encode())
    checked = checked_body(ChatCompletionBody, body.chat)
    assert [tool.function.name for tool in checked.tools or ()] == ["notes__find", "find"]
    made = checked.messages[1].tool_calls or []
    assert [tool_call.function.name for tool_call in made] == ["notes__find"]
    texts = [text.replace('"find"', '"notes__find"') for text in TEXTS]
    events = await streamed("/v1/responses", texts, input=items, tools=tools)
    items = [e["item"] for e in events if e["type"].startswith("response.output_item")]
    calls = [item for item in items if item["type"] == "function_call"]
    assert [(item["namespace"], item["name"]) for item in calls] == [("notes", "find")] * 2
    assert all(ResponseFunctionToolCall.model_validate(item).namespace == "notes" for item in calls)
    (done,) = (e for e in events if e["type"] == "response.function_call_arguments.done")
    assert done["name"] == "find"


FIRST = "messages[0].content[0]"
INPUT_IMAGE = {"type": "input_image", "image_url": "data:,x"}


def user(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    "kind, body, field",
    [
        (ResponsesBody, {"background": True, "store": False}, "background"),
        (ResponsesBody, {"conversation": "c", "previous_response_id": "r"}, "conversation"),
        (ResponsesBody, {"input": [{"type": "item_reference"}]}, "input[0].id"),
        (ResponsesBody, {"prompt": {"id": "x"}}, "prompt"),
        (MessagesBody, {"max_tokens": 0}, "max_tokens"),
        (MessagesBody, user({"type": "document", "source": {}}), f"{FIRST}.source.type"),
        (MessagesBody, user({"type": "image"}), f"{FIRST}.source"),
        (MessagesBody, user({"type": "image", "source": {"type": "file"}}), f"{FIRST}.source.type"),
        (
            ResponsesBody,
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            ResponsesBody,
            {"input": [{"role": "assistant", "content": [INPUT_IMAGE]}]},
            "input[0].content",
        ),
    ],
)
def test_what_cannot_be_done_is_named(kind: Any, body: dict[str, Any], field: str) -> None:
    whole = {"input": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]} | body
    with pytest.raises(InvalidRequest) as raised:
        parse_body(kind, json.dumps(whole).encode())
    assert list(raised.value.violations) == [field]


async def test_the_events_of_messages_are_those_of_anthropic() -> None:
    events = await streamed("/v1/messages", TEXTS)
    known: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in events:
        known.validate_python(event)
    starts = [event["content_block"] for event in events if "content_block" in event]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert starts[2]["name"] == "find"
    said: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            (text,) = (value for name, value in event["delta"].items() if name != "type")
            said[event["index"]] = said.get(event["index"], "") + text
    assert (said[0], said[1], json.loads(said[2])) == ("hmm", "I look it up.", {"what": "Paris"})
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    usage = events[-2]["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (16, 96)
    counted = await LocalApp().post("/v1/messages/count_tokens", ASKED["/v1/messages"])
    assert usage["input_tokens"] + 112 == counted.json["input_tokens"]


async def test_the_events_of_responses_are_those_of_openai() -> None:
    events = await streamed("/v1/responses", TEXTS)
    known: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        if "response" not in event:
            known.validate_python(event)
    assert events[0]["response"]["output"] == []
    ended = events[-1]
    assert ended["type"] == "response.completed"
    reasoning, said, call = ended["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert said["content"][0]["text"] == "I look it up."
    assert (call["name"], json.loads(call["arguments"])) == ("find", {"what": "Paris"})
    assert ended["response"]["usage"]["input_tokens_details"] == {
        "cached_tokens": 16,
        "cache_write_tokens": 96,
    }
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == [
        reasoning,
        said,
        call,
    ]


async def test_responses_have_the_logprobs_of_the_text_alone() -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = await streamed("/v1/responses", TEXTS, **asked)
    known: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in (one for one in events if one["type"].startswith("response.output_text")):
        known.validate_python(event)
    deltas = [one for one in events if one["type"] == "response.output_text.delta"]
    assert ["".join(one["token"] for one in delta["logprobs"]) for delta in deltas] == [
        delta["delta"] for delta in deltas
    ]
    whole = (await answered("/v1/responses", TEXTS, **asked)).json
    for response in (events[-1]["response"], whole):
        (text,) = (item for item in response["output"] if item["type"] == "message")
        (part,) = text["content"]
        assert "".join(one["token"] for one in part["logprobs"]) == part["text"] != ""
    plain = (await answered("/v1/responses", TEXTS, include=["reasoning.encrypted_content"])).json
    assert plain["output"][1]["content"][0]["logprobs"] == []


async def test_a_text_after_a_call_is_a_block_of_its_own() -> None:
    events = await streamed("/v1/responses", (*TEXTS[:3], f"{TEXTS[3]} Done."))
    call, said = events[-1]["response"]["output"][2:]
    assert json.loads(call["arguments"]) == {"what": "Paris"}
    assert said["content"][0]["text"] == " Done."


async def test_a_text_that_no_client_takes_yet_is_said_once() -> None:
    request, head = Request(), ResponseHead("resp_1", 1, "sim")
    form = ResponsesFormat(head, AnswerRules(), {}, ByteCodec(), {}, AsyncMock(), ())
    outlet = EventStream(request.exchange, form, choices=1, prompts=1)
    outlet.write_message(inference_pb2.GenerateResponse(text="a"))
    for paused, text in ((True, "b"), (False, "")):
        request.write_paused = paused
        assert not outlet.write_text(text)
    assert outlet.write_text("b")
    assert form.blocks[0].text == "ab"
    assert b'"sequence_number": 5,' in request.sent


def plain(blocks: list[dict[str, Any]]) -> list[Any]:
    """Blocks without the ids that each answer makes anew."""
    return [{k: v for k, v in block.items() if k not in ("id", "call_id")} for block in blocks]


async def test_a_whole_answer_has_the_blocks_of_a_streamed_one() -> None:
    whole = (await answered("/v1/messages", TEXTS)).json["content"]
    assert [block["type"] for block in whole] == ["thinking", "text", "tool_use"]
    assert (whole[0]["thinking"], whole[1]["text"]) == ("hmm", "I look it up.")
    assert whole[2]["input"] == {"what": "Paris"}
    ended = (await streamed("/v1/responses", TEXTS))[-1]["response"]["output"]
    output = (await answered("/v1/responses", TEXTS)).json["output"]
    assert plain(output) == plain(ended)


async def test_the_usage_of_responses_has_the_tokens_of_reasoning() -> None:
    last = (await streamed("/v1/responses", TEXTS))[-1]["response"]
    for response in (last, (await answered("/v1/responses", TEXTS)).json):
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("hmm")}
    ended = (await answered("/v1/responses", TEXTS, reasoning="")).json
    assert ended["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


async def test_the_end_of_an_answer_has_its_cause() -> None:
    plainly: dict[str, Any] = {"reasoning": "", "tools": []}
    found = (await answered("/v1/messages", ["a"], stop_text="END", **plainly)).json
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")
    events = await streamed("/v1/messages", ["a"], finish_reason=LENGTH, **plainly)
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    cut = await streamed("/v1/responses", ["a"], finish_reason=LENGTH, **plainly)
    assert cut[-1]["type"] == "response.incomplete"
    assert cut[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut[-1]["response"]["output"][0]["status"] == "incomplete"


async def test_errors_have_the_form_of_their_api() -> None:
    app = LocalApp(texts=("a", "b"))
    app.runner.error = QueueFull("it is full")
    assert (await app.post("/v1/messages", ASKED["/v1/messages"])).json == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "it is full"},
    }
    streamed = await app.post("/v1/messages", {**ASKED["/v1/messages"], "stream": True})
    assert b'event: error\ndata: {"type": "error"' in streamed.body
    streamed = await app.post("/v1/responses", {**ASKED["/v1/responses"], "stream": True})
    failed = streamed.named_events[-1]
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 5)
    assert failed["response"]["error"] == {"code": "rate_limit_exceeded", "message": "it is full"}
    TypeAdapter[Any](ResponseStreamEvent).validate_python(failed)


async def test_blocks_of_a_conversation_become_text_or_are_named() -> None:
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    said = {"content": [{"type": "text", "text": "found"}]}
    found = {"type": "search_result", "title": "T", "source": "https://a.test", **said}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [found]}
    body = {
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "document", "title": "a.pdf", "source": pdf}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": 5},
                    {"type": "tool_use", "id": "c", "name": "find", "input": {}},
                ],
            },
            {"role": "user", "content": [result, {"type": "tool_reference", "tool_name": "find"}]},
            {"role": "assistant", "content": "The capital is"},
        ],
    }
    reply = await LocalApp(reasoning="").post("/v1/messages", body)
    assert reply.headers["x-headrace-ignored-fields"] == "messages.content.server_tool_use"
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    (request,) = reply.requests
    assert [(one.role, one.content) for one in request.chat.messages] == [
        ("system", "Be brief."),
        ("user", "a.pdf\n[application/pdf: not readable here]"),
        ("assistant", ""),
        ("tool", "T\nfound"),
        ("user", "find"),
        ("assistant", "The capital is"),
    ]
    assert request.chat.continue_final_message


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "G"}
PATCH = {"type": "custom", "name": "apply_patch", "format": GRAMMAR}


async def test_a_custom_tool_is_called_with_a_text() -> None:
    calls = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** A\\n"}}</tool_call>'
    app = LocalApp(reasoning="", texts=(calls[:50], calls[50:]))
    body = {"input": "x", "tools": [PATCH], "stream": True}
    reply = await app.post("/v1/responses", body)
    (tool,) = reply.requests[0].chat.tools
    assert "follows this grammar:\nG" in tool.description
    assert json.loads(tool.parameters)["required"] == ["input"]
    for event in reply.named_events:
        TypeAdapter[Any](ResponseStreamEvent).validate_python(event)
    (done,) = (e for e in reply.named_events if e["type"].endswith("call_input.done"))
    (item,) = reply.named_events[-1]["response"]["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    assert item["input"] == done["input"] == "*** A\n"
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    again = await app.post("/v1/responses", {**body, "input": [item, output]})
    call, result = again.requests[0].chat.messages
    assert json.loads(call.tool_calls[0].arguments) == {"input": "*** A\n"}
    assert (result.role, result.content) == ("tool", "done")


async def test_items_of_a_conversation_become_calls_and_text_or_are_named() -> None:
    exec_ = {"type": "exec", "command": ["ls"]}
    shell = {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a.py"}]}
    data = "data:application/pdf;base64,JV"
    file = {"type": "input_file", "filename": "a.pdf", "file_data": data}
    items = [
        {"role": "user", "content": [file, {"type": "input_audio", "data": "x"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "local_shell_call", "call_id": "c", "action": exec_, "status": "completed"},
        shell,
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "compaction", "encrypted_content": "x"},
        {"role": "user", "content": "And now?"},
    ]
    reply = await LocalApp().post("/v1/responses", {"input": items})
    ignored = "input.compaction, input.content.input_audio, input.web_search_call"
    assert reply.headers["x-headrace-ignored-fields"] == ignored
    user, call, result, last = reply.requests[0].chat.messages
    assert user.content.strip() == "[a.pdf: not readable here]"
    assert call.tool_calls[0].name == "local_shell"
    assert json.loads(call.tool_calls[0].arguments) == exec_
    assert (json.loads(result.content), last.content) == ([{"stdout": "a.py"}], "And now?")


async def test_fields_of_chats_have_their_effect_and_unknown_ones_are_named() -> None:
    fields = {"min_p": 0.5, "seed": 7, "stop": ["x"], "cache_salt": "s", "unheard": 1}
    for path, body in ASKED.items():
        reply = await LocalApp().post(path, body | fields)
        (request,) = reply.requests
        sampling = request.sampling
        assert (sampling.min_p, sampling.seed, list(sampling.stop)) == (0.5, 7, ["x"])
        assert request.cache_salt == "s"
        assert reply.headers["x-headrace-ignored-fields"] == "unheard"
        strict = LocalApp(rejects_unknown_fields=True)
        assert (await strict.post(path, body | fields)).status == 400
        assert (await strict.post(path, body)).status == 200
