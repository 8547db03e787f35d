"""Every field of the APIs' requests, by their SDKs and by vLLM, with null, its default, valid and invalid values.

No value fails the server. A value that is accepted has an effect, is neutral, or is named as ignored.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
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
from openai.types.responses import response_create_params

from headrace_frontend.openai.body import Body
from headrace_frontend.openai.messages import MessageBody
from headrace_frontend.openai.requests import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from headrace_text.load import ByteCodec
from tests.kit.openai_app import LocalApp, Reply

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
    "return_tokens_as_token_ids": (True, {"logprobs": True}),
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
# add_generation_prompt is false where continue_final_message is true. The tokenizer has no special tokens.
WITHOUT_EFFECT: Final = ChatCompletionBody.without_effect | {
    *("model", "add_generation_prompt", "add_special_tokens", "prompt_cache_key")
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


def sdk_fields(*kinds: Any) -> Iterator[tuple[str, Any]]:
    for kind in kinds:
        for name in kind.__annotations__:
            yield name, DEFAULTS.get(name, ...)


def generate_fields(body: type[Body], params: Any, path: str, name: str) -> Iterable[Any]:
    """Those of a body, of its SDK and of vLLM."""
    fields: dict[str, Any] = {name: DEFAULTS.get(name, ...) for name in body.model_fields}
    own = (params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming)
    for field, default in (*sdk_fields(*own), *vllm_fields(path, name)):
        if default not in (None, ...) or field not in fields:
            fields[field] = default
    return fields.items()


@dataclass(frozen=True, slots=True)
class Api:
    """An API: the fields that it needs, and those of its requests with their defaults. Ellipsis: no plain default."""

    path: str
    needed: Mapping[str, Any]
    fields: Callable[[], Iterable[tuple[str, Any]]]
    special: Mapping[str, tuple[Any, Mapping[str, Any]]]
    """Valid values of fields for which VALID has none, with the fields that they need."""
    body: type[Body] | None = None
    """Set where each accepted value must have an effect, be neutral, or be named as ignored."""


def alone(**values: Any) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    return {name: (value, {}) for name, value in values.items()}


TOKENIZE: Final = "serve/tokenize/protocol.py"
APIS: Final = {
    "chat": Api(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}]},
        lambda: generate_fields(
            *(ChatCompletionBody, chat_params, "openai/chat_completion/protocol.py"),
            "ChatCompletionRequest",
        ),
        SPECIAL,
        ChatCompletionBody,
    ),
    "completion": Api(
        "/v1/completions",
        {"prompt": "hi"},
        lambda: generate_fields(
            *(CompletionBody, completion_create_params, "openai/completion/protocol.py"),
            "CompletionRequest",
        ),
        {**SPECIAL, "return_tokens_as_token_ids": (True, {"logprobs": 1})},
        CompletionBody,
    ),
    "tokenize a text": Api(
        "/tokenize",
        {"prompt": "hi"},
        lambda: vllm_fields(TOKENIZE, "TokenizeCompletionRequest"),
        alone(model="sim", prompt="other"),
        TokenizeBody,
    ),
    "tokenize a chat": Api(
        "/tokenize",
        {"messages": [USER]},
        lambda: vllm_fields(TOKENIZE, "TokenizeChatRequest"),
        alone(model="sim", messages=[{"role": "user", "content": "x"}], tools=[TOOL]),
        TokenizeBody,
    ),
    "detokenize": Api(
        "/detokenize",
        {"tokens": [97]},
        lambda: vllm_fields(TOKENIZE, "DetokenizeRequest"),
        alone(model="sim", tokens=[98]),
        DetokenizeBody,
    ),
    "responses": Api(
        "/v1/responses",
        {"input": "hi"},
        lambda: sdk_fields(
            response_create_params.ResponseCreateParamsBase,
            response_create_params.ResponseCreateParamsStreaming,
        ),
        alone(
            model="sim",
            input=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            reasoning={"effort": "low"},
            text={"format": {"type": "json_object"}},
        ),
    ),
    "messages": Api(
        "/v1/messages",
        {"messages": [USER], "max_tokens": 5},
        lambda: sdk_fields(
            message_create_params.MessageCreateParamsBase,
            message_create_params.MessageCreateParamsStreaming,
        ),
        alone(
            model="sim",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"name": "f", "input_schema": {"type": "object"}}],
            thinking={"type": "disabled"},
        ),
    ),
    "count tokens": Api(
        "/v1/messages/count_tokens",
        {"messages": [USER]},
        lambda: sdk_fields(message_count_tokens_params.MessageCountTokensParams),
        alone(model="sim", messages=[{"role": "user", "content": "x"}]),
    ),
}


async def ask(app: LocalApp, api: Api, fields: Mapping[str, Any]) -> Reply:
    # A header has precedence over the field.
    named = {} if "request_id" in fields else {"x_request_id": "r"}
    reply = await app.post(api.path, {**api.needed, **fields}, **named)
    assert reply.status in (200, 400, 404), (fields, reply.body)
    if reply.status != 200:
        assert reply.body.startswith((b'{"error"', b'{"type": "error"')), reply.body
    return reply


def seen(api: Api, reply: Reply) -> Any:
    """What a request became: the requests to workers with all defaults, and the response where it is repeatable."""
    answers = [(one.n, one.best_of or one.n, one.priority) for one in reply.requests]
    prepared = [replace(one, tokenized_ns=(0, 0), codec=CODEC) for one in reply.prepared]
    body = reply.body if api.body is not None else b""
    return prepared, answers, reply.timeouts_s, body


@pytest.mark.parametrize("name", APIS)
async def test_null_and_defaults_count_as_left_out(name: str) -> None:
    api, app = APIS[name], LocalApp()
    base = await ask(app, api, {})
    assert base.status == 200
    fields = dict(api.fields())
    assert fields.keys() > api.needed.keys()
    for field, default in fields.items():
        # An id is made for each request.
        if field == "request_id":
            continue
        if field in api.needed:
            assert (await ask(app, api, {field: None})).status == 400, field
            continue
        for value in [None] if default in (None, ...) else [None, default]:
            reply = await ask(app, api, {field: value})
            assert reply.status == 200, (field, value, reply.body)
            assert seen(api, reply) == seen(api, base), (field, value)
            assert IGNORED not in reply.headers or value is not None, field


@pytest.mark.parametrize("name", APIS)
async def test_no_value_fails_the_server_or_is_accepted_silently(name: str) -> None:
    api, defaults = APIS[name], dict(APIS[name].fields())
    for field in defaults:
        refused = api.body is not None and field in api.body.neutral
        app = LocalApp(reasoning="qwen3" if field == "include_reasoning" else "")
        special = api.special.get(field)
        needs = special[1] if special else {}
        base = await ask(app, api, needs)
        accepted = 0
        for value in (*([special[0]] if special else VALID), *INVALID):
            reply = await ask(app, api, {**needs, field: value})
            if reply.status != 200:
                assert special is None or refused or value != special[0], (field, reply.body)
                assert api.body not in (ChatCompletionBody, CompletionBody) or reply.error["param"]
                continue
            accepted += 1
            if api.body is not None:
                ignored = reply.headers.get(IGNORED, "").split(", ")
                named = any(path.partition(".")[0] == field for path in ignored)
                plain = (
                    named or field in WITHOUT_EFFECT or neutral(api.body, defaults, field, value)
                )
                assert plain or seen(api, reply) != seen(api, base), (field, value)
        # Each field of these has a valid value, or is refused whatever its value.
        assert accepted or api.body is None or refused, field


def neutral(body: type[Body], defaults: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether a value is the default, or has the same meaning."""
    field = body.model_fields.get(name)
    return value in (*body.neutral.get(name, ()), defaults[name]) or (
        field is not None and value == field.get_default()
    )


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
    base = await ask(app, APIS["chat"], {"messages": [message]})
    assert base.status == 200
    for name in {*params.__annotations__, "id", "cache_control"} - {"role"}:
        for value in (None, *VALID, *INVALID):
            reply = await ask(app, APIS["chat"], {"messages": [{**message, name: value}]})
            changed = [one.chat for one in reply.requests] != [one.chat for one in base.requests]
            if value is None:
                assert not changed or name in needed
            elif reply.status == 200 and not changed:
                named = f"messages.{name}" in reply.headers.get(IGNORED, "")
                assert named or name in MessageBody.without_effect or value in needed.values()
