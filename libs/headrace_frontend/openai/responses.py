"""OpenAI responses from the messages of the InferenceService: JSON objects and server-sent events."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.latency.breakdown import breakdown_object
from headrace_frontend.openai.answers import AnswerRules, ChatAnswer, whole_message
from headrace_text.codec import TextCodec

DONE_EVENT: Final = b"data: [DONE]\n\n"
_FINISH_REASONS: Final = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}
# JSON has no infinity.
_LOGPROB_MIN = -9999.0
_ALL_CONTENT: Final = AnswerRules()
_quote = json.encoder.encode_basestring_ascii
# A text that occurs nowhere else in an event: a request's id and a model's name have no such characters.
_MARK: Final = "\x00\x01"
_QUOTED_MARK: Final = _quote(_MARK).encode()


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every event of a response repeats. `id` is the request's id. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class CollectedChoice:
    """One choice of a response that is not streamed."""

    texts: list[str] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    reason: sampling_pb2.FinishReason.ValueType = sampling_pb2.FINISH_REASON_UNSPECIFIED
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)
    stop_text: str = ""
    latency: dict[str, Any] | None = None
    """Set when the client wants it."""

    def add(self, message: inference_pb2.GenerateResponse, tokens: list[dict[str, Any]]) -> None:
        """Appends a message. `tokens` has the message's logprobs."""
        self.texts.append(message.text)
        self.tokens += tokens
        if message.finish_reason:
            self.reason = message.finish_reason
            self.usage = message.usage
            self.stop_text = message.stop_text
            self.latency = _latency_of(message)

    @property
    def extensions(self) -> dict[str, Any]:
        """Fields that OpenAI does not have."""
        latency = {} if self.latency is None else {"latency": self.latency}
        return {"stop_reason": self.stop_text or None, **latency}


class AnswerFormat(Protocol):
    """Formats one response: its events if it is streamed, or else one object."""

    def first_event(self, index: int) -> bytes:
        """The events before the first text. Empty if there are none."""
        ...

    def event(self, index: int, message: inference_pb2.GenerateResponse, offset: int = 0) -> bytes:
        """The events for one message, or nothing. `offset` is the number of characters before it."""
        ...

    def text_event(self, index: int, text: str) -> bytes | None:
        """As `event`, for a message with text alone. None when the event depends on more than the text."""
        ...

    def last_event(self, usages: Sequence[inference_pb2.Usage], prompts: int) -> bytes:
        """The end of the stream."""
        ...

    def whole(self, choices: Sequence[CollectedChoice], prompts: int) -> bytes:
        """The response as one object."""
        ...

    def tokens_of(self, message: inference_pb2.GenerateResponse) -> list[dict[str, Any]]:
        """The tokens of a message with their logprobs. Empty when logprobs were not requested."""
        ...


class ResponseFormat(ABC):
    """The formats of /v1/completions and /v1/chat/completions."""

    kind: str
    chunk_kind: str

    def __init__(self, head: ResponseHead, codec: TextCodec, *, includes_usage: bool) -> None:
        self._head = head
        self._codec = codec
        self._includes_usage = includes_usage
        self._prefix = (
            f'data: {{"id": {_quote(head.id)}, "object": "{self.chunk_kind}", "created": {head.created}, '
            f'"model": {_quote(head.model)}, "choices": ['
        )
        self._suffix = '], "usage": null}\n\n' if includes_usage else "]}\n\n"
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def _choice(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        """The choice of an object."""

    @abstractmethod
    def _delta(self, index: int, message: inference_pb2.GenerateResponse) -> str | None:
        """The JSON field that has the text of an event. None: there is nothing to send yet."""

    def _finish_reason(self, index: int, reason: sampling_pb2.FinishReason.ValueType) -> str | None:
        return _FINISH_REASONS.get(reason)

    @abstractmethod
    def _logprobs(self, tokens: list[dict[str, Any]], offset: int) -> dict[str, Any]:
        """The logprobs of some tokens. `offset` is the number of characters before them."""

    def first_event(self, index: int) -> bytes:
        """The event before the first text. Empty if there is none."""
        return b""

    def event(self, index: int, message: inference_pb2.GenerateResponse, offset: int = 0) -> bytes:
        """The event for one message, or nothing. `offset` is the number of characters before it."""
        delta = self._delta(index, message)
        if delta is None:
            return b""
        reason = self._finish_reason(index, message.finish_reason)
        logprobs = "null"
        if message.logprobs:
            logprobs = json.dumps(self._logprobs(self.tokens_of(message), offset))
        ending = f'"{reason}"' if reason else "null"
        if message.finish_reason:
            ending += (
                f', "stop_reason": {_quote(message.stop_text) if message.stop_text else "null"}'
            )
        latency = _latency_of(message) if message.finish_reason else None
        if latency is not None:
            ending = f'{ending}, "latency": {json.dumps(latency)}'
        return (
            f'{self._prefix}{{"index": {index}, {delta}, "logprobs": {logprobs}, '
            f'"finish_reason": {ending}}}{self._suffix}'
        ).encode()

    def text_event(self, index: int, text: str) -> bytes | None:
        """As `event`, for a message with text alone. None when the event depends on more than the text."""
        template = self._templates.get(index)
        if template is None:
            whole = self.event(index, inference_pb2.GenerateResponse(text=_MARK))
            head, _, tail = whole.partition(_QUOTED_MARK)
            template = self._templates[index] = (head, tail)
        head, tail = template
        return b"%b%b%b" % (head, _quote(text).encode(), tail)

    def last_event(self, usages: Sequence[inference_pb2.Usage], prompts: int) -> bytes:
        """The end of the stream, after the event of the usage if that is wanted."""
        if not self._includes_usage:
            return DONE_EVENT
        usage = json.dumps(usage_object(usages, prompts))
        return f'{self._prefix}], "usage": {usage}}}\n\n'.encode() + DONE_EVENT

    def whole(self, choices: Sequence[CollectedChoice], prompts: int) -> bytes:
        """The response as one object."""
        return json.dumps(
            {
                "id": self._head.id,
                "object": self.kind,
                "created": self._head.created,
                "model": self._head.model,
                "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
                "usage": usage_object([choice.usage for choice in choices], prompts),
            }
        ).encode()

    def tokens_of(self, message: inference_pb2.GenerateResponse) -> list[dict[str, Any]]:
        """The tokens of a message with their logprobs. Empty when logprobs were not requested."""
        return [
            {
                **self._token(token_id, entry.logprob),
                "top_logprobs": [
                    self._token(other.token_id, other.logprob) for other in entry.alternatives
                ],
            }
            for token_id, entry in zip(message.token_ids, message.logprobs, strict=False)
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._codec.decode([token_id])
        return {
            "token": text,
            "logprob": max(logprob, _LOGPROB_MIN) if math.isfinite(logprob) else _LOGPROB_MIN,
            # A token may be a part of a character, which has no text of its own.
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }


class ChatFormat(ResponseFormat):
    """The responses of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        head: ResponseHead,
        codec: TextCodec,
        *,
        includes_usage: bool,
        rules: AnswerRules = _ALL_CONTENT,
    ) -> None:
        super().__init__(head, codec, includes_usage=includes_usage)
        self._rules = rules
        self._answers: dict[int, ChatAnswer] = {}

    def first_event(self, index: int) -> bytes:
        return (
            f'{self._prefix}{{"index": {index}, "delta": {{"role": "assistant", "content": ""}}, '
            f'"logprobs": null, "finish_reason": null}}{self._suffix}'
        ).encode()

    def _delta(self, index: int, message: inference_pb2.GenerateResponse) -> str | None:
        if not self._rules.divides:
            text = message.text
            return f'"delta": {{"content": {_quote(text)}}}' if text else '"delta": {}'
        answer = self._answers.get(index)
        if answer is None:
            answer = self._answers[index] = ChatAnswer(self._rules)
        last = bool(message.finish_reason)
        delta = answer.delta(message.text, last=last)
        if not delta and not last and not message.logprobs:
            return None
        return f'"delta": {json.dumps(delta)}'

    def text_event(self, index: int, text: str) -> bytes | None:
        return None if self._rules.divides else super().text_event(index, text)

    def _finish_reason(self, index: int, reason: sampling_pb2.FinishReason.ValueType) -> str | None:
        answer = self._answers.get(index)
        return self._reason_after_calls(reason, called=answer is not None and answer.called)

    def _reason_after_calls(
        self, reason: sampling_pb2.FinishReason.ValueType, *, called: bool
    ) -> str | None:
        # As OpenAI, a call of the function that the request names ends with stop.
        if called and reason == sampling_pb2.FINISH_REASON_STOP and not self._rules.required:
            return "tool_calls"
        return _FINISH_REASONS.get(reason)

    def _choice(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        message = whole_message("".join(choice.texts), self._rules)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens, 0) if choice.tokens else None,
            "finish_reason": self._reason_after_calls(
                choice.reason, called="tool_calls" in message
            ),
            **choice.extensions,
        }

    def _logprobs(self, tokens: list[dict[str, Any]], offset: int) -> dict[str, Any]:
        return {"content": tokens, "refusal": None}


class CompletionFormat(ResponseFormat):
    """The responses of /v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def _delta(self, index: int, message: inference_pb2.GenerateResponse) -> str | None:
        return f'"text": {_quote(message.text)}'

    def _choice(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": self._logprobs(choice.tokens, 0) if choice.tokens else None,
            "finish_reason": _FINISH_REASONS.get(choice.reason),
            **choice.extensions,
        }

    def _logprobs(self, tokens: list[dict[str, Any]], offset: int) -> dict[str, Any]:
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in token["top_logprobs"]}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _latency_of(message: inference_pb2.GenerateResponse) -> dict[str, Any] | None:
    timing = message.timing
    return breakdown_object(timing.latency) if timing.HasField("latency") else None


def usage_object(usages: Sequence[inference_pb2.Usage], prompts: int) -> dict[str, Any]:
    """The usage of a response with the choices of `prompts` prompts. Each prompt counts once."""
    per_prompt = len(usages) // prompts
    prompt_usages = usages[::per_prompt]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompt_usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.decode_cached_tokens for usage in prompt_usages)
        },
    }


def models_object(models: Iterable[inference_pb2.Model], created: int) -> dict[str, Any]:
    """The response of /v1/models. `created` is when this router started."""
    return {"object": "list", "data": [model_object(model, created) for model in models]}


def model_object(model: inference_pb2.Model, created: int) -> dict[str, Any]:
    """One model, or one adapter, which has a parent."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "root": model.parent or model.name,
        "parent": model.parent or None,
        "max_model_len": model.max_model_len,
    }
