"""Every field of the other APIs' requests, by their SDKs and by vLLM, with null, its default, valid and invalid values.

The fields of chats and completions: `test_schemas`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types.responses import response_create_params

from headrace_frontend.openai.body import Body
from headrace_frontend.openai.requests import DetokenizeBody, TokenizeBody
from tests.unit.frontend.openai.local_app import LocalApp, Reply
from tests.unit.frontend.openai.test_schemas import (
    CODEC,
    IGNORED,
    INVALID,
    TOOL,
    USER,
    VALID,
    vllm_fields,
)

VLLM: Final = "serve/tokenize/protocol.py"
FUNCTION: Final = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@dataclass(frozen=True, slots=True)
class Api:
    """An API: the fields that it needs, and those of its requests with their defaults. Ellipsis: no plain default."""

    path: str
    needed: Mapping[str, Any]
    fields: Callable[[], Iterable[tuple[str, Any]]]
    special: Mapping[str, Any]
    """Valid values of fields for which VALID has none."""
    body: type[Body] | None = None
    """Set where each accepted value must have an effect, be neutral, or be named as ignored."""


def sdk_fields(*kinds: Any) -> Callable[[], Iterable[tuple[str, Any]]]:
    return lambda: [(name, ...) for kind in kinds for name in kind.__annotations__]


APIS: Final = {
    "tokenize a text": Api(
        "/tokenize",
        {"prompt": "hi"},
        lambda: vllm_fields(VLLM, "TokenizeCompletionRequest"),
        {"model": "sim", "prompt": "other"},
        TokenizeBody,
    ),
    "tokenize a chat": Api(
        "/tokenize",
        {"messages": [USER]},
        lambda: vllm_fields(VLLM, "TokenizeChatRequest"),
        {"model": "sim", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL]},
        TokenizeBody,
    ),
    "detokenize": Api(
        "/detokenize",
        {"tokens": [97]},
        lambda: vllm_fields(VLLM, "DetokenizeRequest"),
        {"model": "sim", "tokens": [98]},
        DetokenizeBody,
    ),
    "responses": Api(
        "/v1/responses",
        {"input": "hi"},
        sdk_fields(
            response_create_params.ResponseCreateParamsBase,
            response_create_params.ResponseCreateParamsStreaming,
        ),
        {
            "model": "sim",
            "input": [{"role": "user", "content": "x"}],
            "tools": [FUNCTION],
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_object"}},
        },
    ),
    "messages": Api(
        "/v1/messages",
        {"messages": [USER], "max_tokens": 5},
        sdk_fields(
            message_create_params.MessageCreateParamsBase,
            message_create_params.MessageCreateParamsStreaming,
        ),
        {
            "model": "sim",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "thinking": {"type": "disabled"},
        },
    ),
    "count tokens": Api(
        "/v1/messages/count_tokens",
        {"messages": [USER]},
        sdk_fields(message_count_tokens_params.MessageCountTokensParams),
        {"model": "sim", "messages": [{"role": "user", "content": "x"}]},
    ),
}
# The tokenizer of the model has no special tokens, and these values have the meaning of their absence.
WITHOUT_EFFECT: Final = {"model", "add_special_tokens"}


async def ask(app: LocalApp, api: Api, fields: Mapping[str, Any]) -> Reply:
    reply = await app.post(api.path, {**api.needed, **fields}, x_request_id="r")
    assert reply.status in (200, 400, 404), (fields, reply.body)
    return reply


def seen(reply: Reply) -> Any:
    """What a request became: the requests to workers with all defaults, or else the response."""
    if reply.requests:
        return [replace(one, tokenized_ns=(0, 0), codec=CODEC) for one in reply.prepared]
    return reply.body


@pytest.mark.parametrize("name", APIS)
async def test_null_and_defaults_count_as_left_out(name: str) -> None:
    api, app = APIS[name], LocalApp()
    base = await ask(app, api, {})
    assert base.status == 200
    fields = dict(api.fields())
    assert fields.keys() > api.needed.keys()
    for field, default in fields.items():
        if field in api.needed:
            assert (await ask(app, api, {field: None})).status == 400, field
            continue
        for value in [None] if default in (None, ...) else [None, default]:
            reply = await ask(app, api, {field: value})
            assert (reply.status, seen(reply)) == (200, seen(base)), (field, value)
            assert IGNORED not in reply.headers or value is not None, field


@pytest.mark.parametrize("name", APIS)
async def test_no_value_fails_the_server_or_is_accepted_silently(name: str) -> None:
    api, app = APIS[name], LocalApp()
    base = await ask(app, api, {})
    for field, default in api.fields():
        special = api.special.get(field, ...)
        for value in (*(VALID if special is ... else [special]), *INVALID):
            reply = await ask(app, api, {field: value})
            assert special is ... or value != special or reply.status == 200, (field, reply.body)
            if reply.status != 200:
                assert reply.body.startswith((b'{"error"', b'{"type": "error"')), reply.body
            elif api.body is not None:
                neutral = (default, *api.body.neutral.get(field, ()))
                named = any(
                    path.partition(".")[0] == field
                    for path in reply.headers.get(IGNORED, "").split(", ")
                )
                explained = named or field in WITHOUT_EFFECT or value in neutral
                assert explained or seen(reply) != seen(base), (field, value)
