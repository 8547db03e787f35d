"""Answers and errors of /v1/messages, as Anthropic has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_frontend.openai.block_apis.blocks import Block, BlockFormat, BlockKind, named_event
from headrace_frontend.openai.errors import AnyError, ErrorForm, error_object, status_of
from headrace_frontend.openai.responses import CollectedChoice, usage_object
from headrace_frontend.promises import KEPT_FIELD

_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
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
        return named_event({"type": "content_block_stop", "index": block.index})

    def last_event(self, usages: Sequence[inference_pb2.Usage], prompts: int) -> bytes:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._last.stop_text or None}
        usage = _usage(usage_object(usages, prompts))
        return named_event({"type": "message_delta", "delta": delta, "usage": usage}) + named_event(
            {"type": "message_stop"}
        )

    def whole(self, choices: Sequence[CollectedChoice], prompts: int) -> bytes:
        self._collect(choices[0])
        usage = _usage(usage_object([choices[0].usage], prompts))
        content = list(map(_content, self.blocks))
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


def _content(block: Block) -> dict[str, Any]:
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
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
        **{name: value for name, value in usage.items() if name == KEPT_FIELD},
    }
