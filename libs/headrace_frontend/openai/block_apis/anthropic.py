"""The bodies of /v1/messages, as Anthropic has them, and the chats that they ask for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.limits import CHAT_MESSAGES_MAX, CHAT_TOOLS_MAX
from headrace_frontend.openai.block_apis.blocks import Block, BlockFormat, BlockKind, named_event
from headrace_frontend.openai.body import ForwardingBody, LenientBody
from headrace_frontend.openai.errors import AnyError, ErrorForm, error_object, status_of
from headrace_frontend.openai.responses import CollectedChoice, usage_object
from headrace_frontend.promises import KEPT_FIELD, ttl_s
from headrace_frontend.running.receipt import RECEIPT_FIELD

_BLOCKS_MAX: Final = 1_024
_STOPS_MAX: Final = 64
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_BLOCKS: Final = frozenset(
    {
        *("text", "image", "thinking", "tool_use", "tool_result", "redacted_thinking"),
        *("document", "search_result", "tool_reference"),
    }
)
# Claude Code's first system block. It differs between conversations, which could not share cached prefixes.
_BILLING: Final = "x-anthropic-billing-header:"


class CacheControl(LenientBody):
    """Marks the end of a prefix that shall stay cached."""

    ttl: str = "5m"


class SourceBody(LenientBody):
    """The file of an image, or the content of a document."""

    type: Literal["base64", "url", "text", "content", "file"]
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: str | list[BlockBody] | None = None

    @property
    def as_url(self) -> str:
        """As chats have it."""
        return self.url if self.type == "url" else f"data:{self.media_type};base64,{self.data}"


class BlockBody(LenientBody):
    """A block of a message. Of a type that says nothing here, such as what ran at Anthropic, it has the type alone."""

    type: str
    text: str = ""
    title: str = ""
    tool_name: str = ""
    thinking: str = ""
    source: SourceBody | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    cache_control: CacheControl | None = None
    content: (
        str | Annotated[list[BlockBody], Field(fail_fast=True, max_length=_BLOCKS_MAX)] | None
    ) = None

    older = frozenset({"type"})

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        kind = fields.get("type")
        if kind == "search_result":
            # A text here, unlike the file of other blocks.
            fields.pop("source", None)
        # A conversation that began elsewhere goes on without it.
        return fields if not isinstance(kind, str) or kind in _BLOCKS else {"type": kind}

    @property
    def ignored(self) -> Iterable[str]:
        return () if self.type in _BLOCKS else (self.type,)

    @model_validator(mode="after")
    def _check(self) -> BlockBody:
        if self.type == "image":
            if self.source is None:
                raise ValueError("source: is missing; send the image in base64")
            if self.source.type not in ("base64", "url"):
                raise ValueError("source.type: must be base64 or url")
        return self

    @property
    def shown(self) -> str:
        """Its text for the model. Files that are no text are named."""
        if self.type not in ("document", "search_result"):
            return self.text or self.tool_name
        source, content = self.source, self.content
        if source is not None:
            content = source.data if source.type == "text" else source.content
        kind = (source and source.media_type) or "file"
        return "\n".join(
            filter(None, (self.title, _text(content) or f"[{kind}: not readable here]"))
        )


_Blocks = str | Annotated[list[BlockBody], Field(fail_fast=True, max_length=_BLOCKS_MAX)]


class AnthropicMessage(LenientBody):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: _Blocks


class AnthropicTool(LenientBody):
    """A tool. Those of other types run on Anthropic's servers, so they are left out."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(LenientBody):
    """Whether the model must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(LenientBody):
    """Whether the model reasons before it answers."""

    type: str


class OutputFormat(LenientBody):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LenientBody):
    """The form of the answer, and how much the model reasons."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensBody(ForwardingBody):
    """A request of /v1/messages/count_tokens."""

    # They say nothing to the model.
    without_effect = frozenset(
        {
            *("betas", "container", "context_management", "inference_geo", "mcp_servers"),
            *("metadata", "service_tier", "speed"),
        }
    )

    model: str = ""
    messages: Annotated[
        list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=CHAT_MESSAGES_MAX)
    ]
    system: _Blocks | None = None
    tools: (
        Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=CHAT_TOOLS_MAX)] | None
    ) = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @property
    def prompt(self) -> dict[str, Any]:
        """The fields of a chat that the prompt depends on."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*_system(self.system), *_messages(self.messages)],
        }
        if tools := [*map(_tool, self._own_tools)]:
            fields["tools"] = tools
        last = self.messages[-1]
        if last.role == "assistant" and not fields["messages"][-1].get("tool_calls"):
            fields["continue_final_message"] = True
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            given = self.forwarded.get("chat_template_kwargs")
            own = given if isinstance(given, dict) else {}
            fields["chat_template_kwargs"] = {"enable_thinking": thinks, **own}
        return fields

    @property
    def _own_tools(self) -> list[AnthropicTool]:
        return [tool for tool in self.tools or () if tool.type in (None, "custom")]


class MessagesBody(CountTokensBody):
    """A request of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**32)]
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_format: OutputFormat | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True, max_length=_STOPS_MAX)] | None = None

    @property
    def chat(self) -> dict[str, Any]:
        """The body of the same chat for /v1/chat/completions."""
        fields = self.prompt | {
            "stream": self.stream is True,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
        }
        choice = self.tool_choice
        if choice is not None and "tools" in fields:
            fields["tool_choice"] = _CHOICES.get(choice.type) or {
                "type": "function",
                "function": {"name": choice.name},
            }
            if choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        if (config := self.output_config) is not None:
            fields["reasoning_effort"] = config.effort
        if form := (config and config.format) or self.output_format:
            schema = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        contents = (self.system, *(message.content for message in self.messages))
        blocks = chain.from_iterable(one for one in contents if isinstance(one, list))
        marked = (one.cache_control for one in (self, *(self.tools or ()), *blocks))
        if ttls := [one.ttl for one in marked if one is not None]:
            fields["prompt_cache_options"] = {"ttl": max(ttls, key=ttl_s)}
        sent = {name: value for name, value in fields.items() if value is not None}
        return self.forwarded | sent


def _system(system: _Blocks | None) -> Iterator[dict[str, Any]]:
    if isinstance(system, list):
        system = [block for block in system if not block.text.startswith(_BILLING)]
    if content := _content(system):
        yield {"role": "system", "content": content}


def _messages(messages: Iterable[AnthropicMessage]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message.content)
        else:
            yield from _results(message.content)
            if content := _content(message.content):
                yield {"role": message.role, "content": content}


def _results(blocks: Iterable[BlockBody]) -> Iterator[dict[str, Any]]:
    """The results of tools, which follow the calls directly in a chat."""
    for block in blocks:
        if block.type == "tool_result":
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": _text(block.content),
            }


def _assistant(blocks: list[BlockBody]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(blocks)}
    if thoughts := [block.thinking for block in blocks if block.type == "thinking"]:
        message["reasoning"] = "\n".join(thoughts)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {
                "name": block.name,
                "arguments": json.dumps(block.input, ensure_ascii=False),
            },
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    return message | {"tool_calls": calls} if calls else message


def _content(content: _Blocks | None) -> str | list[dict[str, Any]]:
    """The content of a message. Images in the results of tools are part of it, since only users send images."""
    blocks = content if isinstance(content, list) else []
    parts = [part for block in blocks for part in _parts(block)]
    return parts if any(part["type"] == "image_url" for part in parts) else _text(content)


def _parts(block: BlockBody) -> Iterator[dict[str, Any]]:
    if block.type == "image" and block.source is not None:
        yield {"type": "image_url", "image_url": {"url": block.source.as_url}}
    elif block.type == "tool_result":
        for inner in block.content if isinstance(block.content, list) else ():
            if inner.type == "image":
                yield from _parts(inner)
    elif block.shown:
        yield {"type": "text", "text": block.shown}


def _text(content: _Blocks | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(filter(None, (block.shown for block in content)))


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_DELTAS: Final = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesFormat(BlockFormat):
    """The answers of /v1/messages."""

    renamed = {"stop": "stop_sequences", "response_format": "output_config.format"}  # noqa: RUF012
    ping = named_event({"type": "ping"})

    def first_event(self, index: int) -> bytes:
        # The prompt's tokens are known at the end. Clients read them from the last events.
        message = self._message([], None, {"input_tokens": 0, "output_tokens": 0})
        return named_event({"type": "message_start", "message": message})

    def _opened(self, block: Block) -> bytes:
        started: dict[str, Any] = {"type": "text", "text": ""}
        if block.kind is BlockKind.CALL:
            started = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        elif block.kind is BlockKind.REASONING:
            started = {"type": "thinking", "thinking": "", "signature": ""}
        return named_event(
            {"type": "content_block_start", "index": block.index, "content_block": started}
        )

    def _more(self, block: Block, text: str) -> bytes:
        kind, name = _DELTAS[block.kind]
        delta = {"type": kind, name: text}
        return named_event({"type": "content_block_delta", "index": block.index, "delta": delta})

    def _closed(self, block: Block) -> bytes:
        data = b""
        if block.kind is BlockKind.REASONING:
            signature = {"type": "signature_delta", "signature": ""}
            event = {"type": "content_block_delta", "index": block.index, "delta": signature}
            data = named_event(event)
        return data + named_event({"type": "content_block_stop", "index": block.index})

    def last_event(self, usages: Sequence[inference_pb2.Usage], prompts: int) -> bytes:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._last.stop_text or None}
        usage = _usage(usage_object(usages, prompts))
        return named_event({"type": "message_delta", "delta": delta, "usage": usage}) + named_event(
            {"type": "message_stop"}
        )

    def whole(self, choices: Sequence[CollectedChoice], prompts: int) -> bytes:
        self._collect(choices[0])
        usage = _usage(usage_object([choices[0].usage], prompts))
        content = list(map(_block_content, self.blocks))
        return json.dumps(self._message(content, self._stop_reason, usage)).encode()

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._last.stop_text or None,
            "usage": usage,
        }

    @property
    def _stop_reason(self) -> str:
        if self._last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH:
            return "max_tokens"
        if self._answer.called:
            return "tool_use"
        return "stop_sequence" if self._last.stop_text else "end_turn"


def _error(error: AnyError) -> bytes:
    found = error_object(error)["error"]
    kind = _ERROR_TYPES.get(status_of(error), "api_error")
    message = found["message"]
    if found["code"] == "context_length_exceeded":
        # Agents search for Anthropic's words, and then shorten their conversation.
        message = f"prompt is too long: {message}"
    body = {"type": kind, "message": message}
    return json.dumps({"type": "error", "error": body}).encode()


MESSAGES_ERRORS: Final = ErrorForm(
    _error, lambda error: b"event: error\ndata: %b\n\n" % _error(error)
)


def _block_content(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {
        "type": "tool_use",
        "id": block.call_id,
        "name": block.name,
        "input": _arguments(block.text),
    }


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. A model may write none, or a text that is no object."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    details = usage["prompt_tokens_details"]
    cached, written = details["cached_tokens"], details["cache_write_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached - written,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": usage["completion_tokens"],
        **{name: value for name, value in usage.items() if name in (KEPT_FIELD, RECEIPT_FIELD)},
    }
