"""Every field of OpenAI's and vLLM's requests, with null, its default, a valid and an invalid value.

No value fails the server. A value that is accepted has an effect, is neutral, or is named as ignored.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionMessageParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_params

from headrace_frontend.openai.messages import MessageBody
from headrace_frontend.openai.requests import ChatCompletionBody, CompletionBody
from headrace_text.load import ByteCodec
from tests.unit.frontend.openai.local_app import LocalApp, Reply

IGNORED: Final = "x-headrace-ignored-fields"
TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CODEC: Final = ByteCodec()
USER: Final = {"role": "user", "content": "other"}
# Valid values by name, with the fields that they need. Others have the values of `VALID`.
SPECIAL: Final[Mapping[str, tuple[Any, Mapping[str, Any]]]] = {
    "messages": ([USER], {}),
    "prompt": ("other", {}),
    "model": ("sim", {}),
    "functions": ([TOOL["function"]], {}),
    "function_call": ("none", {"functions": [TOOL["function"]]}),
    "tools": ([TOOL], {}),
    "tool_choice": ("required", {"tools": [TOOL]}),
    "parallel_tool_calls": (False, {"tools": [TOOL], "tool_choice": "required"}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "top_logprobs": (2, {"logprobs": True}),
    "return_tokens_as_token_ids": (True, {"logprobs": 1}),
    "continue_final_message": (True, {"add_generation_prompt": False}),
    "add_generation_prompt": (False, {"continue_final_message": True}),
    "response_format": ({"type": "json_object"}, {}),
    "structured_outputs": ({"regex": "a+"}, {}),
    "logit_bias": ({"5": 1.0}, {}),
    "min_tokens": (2, {}),
    "n": (2, {}),
    "best_of": (2, {}),
    "priority": (1, {}),
    "include_reasoning": (False, {}),
    "modalities": (["text", "audio"], {}),
    "audio": ({"format": "wav", "voice": "alloy"}, {}),
    "top_k": (5, {}),
    "seed": (5, {}),
}
VALID: Final = (True, False, 1, 0.5, "text", ["text"], [5], [[5]], {"key": "value"}, [{"key": 1}])
INVALID: Final[tuple[Any, ...]] = (
    {"unheard": ["of"]},
    [None],
    [[{}]],
    "\ud800",
    -7.5,
    2**70,
    1e308,
)
# They say nothing about the answer: docs/openai.md lists them.
# add_generation_prompt is false where continue_final_message is true.
WITHOUT_EFFECT: Final = ChatCompletionBody.without_effect | {
    *("model", "add_generation_prompt", "prompt_cache_key")
}
DEFAULTS: Final = {
    "n": 1,
    "temperature": 1,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "seed": -1,
    "stream": False,
    "stop": [],
    "store": False,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}


def vllm_fields(path: str, name: str) -> Iterator[tuple[str, Any]]:
    """The fields of a class of vLLM with their defaults, read from its source. Ellipsis: none, or no plain value."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("needs vllm")
    source = (Path(found.origin).parent / "entrypoints" / path).read_text()
    (defined,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    for node in defined.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id.startswith("_"):
            continue
        value = node.value
        if isinstance(value, ast.Call):
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            value = given.get("default", value.args[0] if value.args else None)
        try:
            yield node.target.id, ... if value is None else ast.literal_eval(value)
        except ValueError:
            yield node.target.id, ...


def openai_fields(module: Any) -> Iterator[tuple[str, Any]]:
    for kind in (module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming):
        for name in kind.__annotations__:
            yield name, DEFAULTS.get(name, ...)


def fields_of(chat: bool) -> dict[str, Any]:
    """All fields of an endpoint with their defaults."""
    if chat:
        ours = ChatCompletionBody.model_fields
        params: Any = chat_params
        peers = vllm_fields("openai/chat_completion/protocol.py", "ChatCompletionRequest")
    else:
        ours, params = CompletionBody.model_fields, completion_create_params
        peers = vllm_fields("openai/completion/protocol.py", "CompletionRequest")
    fields: dict[str, Any] = {name: DEFAULTS.get(name, ...) for name in ours}
    for name, default in (*openai_fields(params), *peers):
        if default not in (None, ...) or name not in fields:
            fields[name] = default
    return fields


async def ask(app: LocalApp, chat: bool, fields: Mapping[str, Any]) -> Reply:
    reply = await (app.chat(**fields) if chat else app.complete(**fields))
    assert reply.status in (200, 400, 404), (fields, reply.body)
    return reply


def seen(reply: Reply) -> Any:
    """What a request became: the requests to workers with all defaults, and the response."""
    answers = [(one.n, one.best_of or one.n, one.priority) for one in reply.requests]
    prepared = [replace(one, tokenized_ns=(0, 0), codec=CODEC) for one in reply.prepared]
    return prepared, answers, reply.timeouts_s, reply.body


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_null_and_defaults_count_as_left_out(chat: bool) -> None:
    app = LocalApp()
    base = await ask(app, chat, {"request_id": "r"})
    for name, default in fields_of(chat).items():
        # The prompt is needed, and an id is made for each request.
        if name in ("messages", "prompt", "request_id"):
            continue
        for value in [None] if default in (None, ...) else [None, default]:
            reply = await ask(app, chat, {"request_id": "r", name: value})
            assert reply.status == 200, (name, value, reply.body)
            assert seen(reply) == seen(base), (name, value)
            assert IGNORED not in reply.headers or value is not None, name


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_no_value_is_accepted_silently(chat: bool) -> None:
    for name in fields_of(chat):
        app = LocalApp(reasoning="qwen3" if name == "include_reasoning" else "")
        special = SPECIAL.get(name)
        needs: dict[str, Any] = {"request_id": "r", **(special[1] if special else {})}
        if "logprobs" in needs:
            needs["logprobs"] = True if chat else 1
        base = await ask(app, chat, needs)
        accepted = 0
        for value in (*([special[0]] if special else VALID), *INVALID):
            reply = await ask(app, chat, {**needs, name: value})
            if reply.status != 200:
                assert reply.error["param"], (name, value, reply.body)
                continue
            accepted += 1
            ignored = reply.headers.get(IGNORED, "").split(", ")
            named = any(path.partition(".")[0] == name for path in ignored)
            explained = named or name in WITHOUT_EFFECT or neutral(chat, name, value)
            assert explained or seen(reply) != seen(base), (name, value)
        # Each field has a valid value, or is refused whatever its value.
        kind = ChatCompletionBody if chat else CompletionBody
        assert accepted or name in kind.neutral, name


def neutral(chat: bool, name: str, value: Any) -> bool:
    """Whether a value is the default, or has the same meaning."""
    kind = ChatCompletionBody if chat else CompletionBody
    if value in (*kind.neutral.get(name, ()), fields_of(chat)[name]):
        return True
    field = kind.model_fields.get(name)
    return field is not None and value == field.get_default()


MESSAGES: Final[Mapping[str, tuple[Any, dict[str, Any]]]] = {
    "system": (ChatCompletionSystemMessageParam, {"content": "x"}),
    "developer": (ChatCompletionDeveloperMessageParam, {"content": "x"}),
    "user": (ChatCompletionUserMessageParam, {"content": "x"}),
    "assistant": (ChatCompletionAssistantMessageParam, {"content": "x"}),
    "tool": (ChatCompletionToolMessageParam, {"content": "x", "tool_call_id": "c1"}),
    "function": (ChatCompletionFunctionMessageParam, {"content": "x", "name": "f"}),
}


@pytest.mark.parametrize("role", MESSAGES)
async def test_every_field_of_a_message_may_be_null_and_none_fails_the_server(role: str) -> None:
    app = LocalApp()
    params, needed = MESSAGES[role]
    message = {"role": role, **needed}
    base = await ask(app, True, {"messages": [message]})
    assert base.status == 200
    for name in {*params.__annotations__, "id", "cache_control"} - {"role"}:
        for value in (None, *VALID, *INVALID):
            reply = await ask(app, True, {"messages": [{**message, name: value}]})
            changed = [one.chat for one in reply.requests] != [one.chat for one in base.requests]
            if value is None:
                assert not changed or name in needed
            elif reply.status == 200 and not changed:
                named = f"messages.{name}" in reply.headers.get(IGNORED, "")
                assert named or name in MessageBody.without_effect or value in needed.values()
