"""OpenAI responses from the messages of the InferenceService: JSON objects and server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import HeadraceError
from headrace_common.latency.breakdown import breakdown_object
from headrace_frontend.openai.answers import AnswerRules, ChatAnswer, whole_message
from headrace_frontend.openai.requests import Includes
from headrace_frontend.openai.tokens import TokenNames, tokens_within
from headrace_frontend.promises import kept_field
from headrace_frontend.running.receipt import receipt_field
from headrace_text.codec import TextCodec

DONE_EVENT: Final = b"data: [DONE]\n\n"
FINISH_REASONS: Final = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}
_ALL_CONTENT: Final = AnswerRules()
CHOICES_ALONE: Final = Includes()
_NO_FIELDS: Final[Mapping[str, Any]] = {}
quote = json.encoder.encode_basestring_ascii


class ResponseHead(NamedTuple):
    """What every event of a response repeats. `id` is the request's id. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    """See `ModelLister`."""


@dataclass(slots=True)
class CollectedChoice:
    """One choice of a response that is not streamed."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    reason: sampling_pb2.FinishReason.ValueType = sampling_pb2.FINISH_REASON_UNSPECIFIED
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)
    stop_text: str = ""
    latency: dict[str, Any] | None = None
    """Set when the client wants it."""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[sampling_pb2.TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens after the first, where they were requested. Else both are empty."""

    def add(self, message: inference_pb2.GenerateResponse, tokens: list[dict[str, Any]]) -> None:
        """Appends a message. `tokens` has the message's logprobs."""
        self.texts.append(message.text)
        self.token_ids += message.token_ids
        self.tokens += tokens
        self.prompt_token_ids += message.prompt_token_ids
        self.prompt_logprobs += message.prompt_logprobs
        if message.finish_reason:
            self.reason = message.finish_reason
            self.usage = message.usage
            self.stop_text = message.stop_text
            self.latency = _latency_of(message)

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(self.texts)


class AnswerFormat(ABC):
    """Formats one response: its events if it is streamed, or else one object."""

    ping: bytes = b":\n\n"
    """An event that says nothing: a comment."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Fields of the API with other names than those of chats, by the latter."""

    @abstractmethod
    def first_event(self, index: int) -> bytes:
        """The events before the first text. Empty if there are none."""

    @abstractmethod
    def event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        """The events for one message, or nothing."""

    @abstractmethod
    def text_event(self, index: int, text: str) -> bytes | None:
        """As `event`, for a message with text alone. None when the event depends on more than the text."""

    @abstractmethod
    def last_event(self, usages: Sequence[inference_pb2.Usage], prompts: int) -> bytes:
        """The end of the stream."""

    async def stored(self) -> None:  # noqa: B027
        """Stores the whole response, where the client wants it. `last_event` or `whole` came before."""

    def failure_event(self, error: HeadraceError) -> bytes:
        """The end of a stream that an error ends. Empty for that of the API's errors."""
        return b""

    @abstractmethod
    def whole(self, choices: Sequence[CollectedChoice], prompts: int) -> bytes:
        """The response as one object."""

    def tokens_of(self, message: inference_pb2.GenerateResponse) -> list[dict[str, Any]]:
        """The tokens of a message with their logprobs. Empty when logprobs were not requested."""
        return []


class ResponseFormat(AnswerFormat):
    """The formats of /v1/completions and /v1/chat/completions."""

    kind: str
    chunk_kind: str
    # What stands around the text of an event, in the field of its choice.
    text_field: tuple[str, str]
    lists_beside_top: bool
    """See TokenNames."""

    def __init__(
        self, head: ResponseHead, codec: TextCodec, *, includes: Includes = CHOICES_ALONE
    ) -> None:
        self._head = head
        self._codec = codec
        self._includes = includes
        self._prompts: list[Sequence[int]] = []
        """The tokens of each choice's prompt, where `includes` needs them."""
        self._prompt_texts: list[str] = []
        """Their texts, too."""
        fingerprint = quote(head.system_fingerprint) if head.system_fingerprint else "null"
        self._prefix = (
            f'data: {{"id": {quote(head.id)}, "object": "{self.chunk_kind}", "created": {head.created}, '
            f'"model": {quote(head.model)}, "system_fingerprint": {fingerprint}, "choices": ['
        )
        self._suffix = '], "usage": null}\n\n' if includes.usage else "]}\n\n"
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        """What is around a text in an event with text alone, by choice."""
        self._sends_texts = not includes.prompt
        """Whether events can depend on their text alone."""
        self._completion_tokens: dict[int, int] = {}

    @cached_property
    def _names(self) -> TokenNames:
        by_id = self._includes.names_tokens_by_id
        return TokenNames(self._codec, by_id=by_id, beside_top=self.lists_beside_top)

    def add_prompt(self, token_ids: Sequence[int], choices: int, text: str = "") -> None:
        """The tokens and the text of the prompt of the next choices, where the response includes them."""
        self._prompts += [token_ids] * choices
        self._prompt_texts += [text] * choices

    def include_usage(self) -> None:
        """Ends the stream with the usage, for the promise in it, whether or not the options want it."""
        self._includes = self._includes._replace(usage=True)

    @abstractmethod
    def _choice(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        """The choice of an object."""

    @abstractmethod
    def _delta(self, index: int, message: inference_pb2.GenerateResponse) -> str | None:
        """The JSON field that has the text of an event. None: there is nothing to send yet."""

    def _finish_reason(self, index: int, reason: sampling_pb2.FinishReason.ValueType) -> str | None:
        return FINISH_REASONS.get(reason)

    @abstractmethod
    def _logprobs(
        self, index: int, tokens: list[dict[str, Any]], message: inference_pb2.GenerateResponse
    ) -> dict[str, Any]:
        """The logprobs of the tokens of a message."""

    def tokens_of(self, message: inference_pb2.GenerateResponse) -> list[dict[str, Any]]:
        return self._names.tokens_of(message)

    def event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        if message.text and not (message.finish_reason or message.logprobs):
            data = self.text_event(index, message.text)
            if data is not None:
                return data
        return self._whole_event(index, message)

    def _whole_event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        count = self._completion_tokens.get(index, 0) + len(message.token_ids)
        self._completion_tokens[index] = count
        delta = self._delta(index, message)
        if delta is None:
            return b""
        reason = self._finish_reason(index, message.finish_reason)
        logprobs = "null"
        if message.logprobs or message.prompt_token_ids:
            logprobs = json.dumps(self._logprobs(index, self.tokens_of(message), message))
        ending = f'"{reason}"' if reason else "null"
        for name, value in self._extensions(index, message).items():
            ending += f', "{name}": {"null" if value is None else json.dumps(value)}'
        return (
            f'{self._prefix}{{"index": {index}, {delta}, "logprobs": {logprobs}, '
            f'"finish_reason": {ending}}}{self._suffix_of(index)}'
        ).encode()

    def _extensions(self, index: int, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """Fields of the choice in an event that OpenAI does not have."""
        extensions: dict[str, Any] = {}
        if self._includes.token_ids:
            extensions["token_ids"] = list(message.token_ids)
        if message.finish_reason:
            extensions["stop_reason"] = message.stop_text or None
            latency = _latency_of(message)
            if latency is not None:
                extensions["latency"] = latency
        return extensions

    def _suffix_of(self, index: int, fields: Mapping[str, Any] = _NO_FIELDS) -> str:
        """The end of an event of choice `index`, with these fields, and with the usage so far if that is wanted."""
        suffix = self._suffix
        if self._includes.continuous_usage:
            usage = inference_pb2.Usage(
                prompt_tokens=len(self._prompts[index]),
                completion_tokens=self._completion_tokens.get(index, 0),
            )
            suffix = f'], "usage": {json.dumps(usage_object([usage], 1))}}}\n\n'
        if not fields:
            return suffix
        more = "".join(f', "{name}": {json.dumps(value)}' for name, value in fields.items())
        return f"]{more}{suffix[1:]}"

    def text_event(self, index: int, text: str) -> bytes | None:
        if not self._sends_texts:
            return None
        template = self._templates.get(index)
        if template is None:
            before, after = self.text_field
            template = self._templates[index] = (
                f'{self._prefix}{{"index": {index}, {before}'.encode(),
                f'{after}, "logprobs": null, "finish_reason": null}}{self._suffix}'.encode(),
            )
        head, tail = template
        return b"%b%b%b" % (head, quote(text).encode(), tail)

    def last_event(self, usages: Sequence[inference_pb2.Usage], prompts: int) -> bytes:
        """The end of the stream, after the event of the usage if that is wanted."""
        if not self._includes.usage:
            return DONE_EVENT
        usage = json.dumps({**usage_object(usages, prompts), **self._usage_details(())})
        return f'{self._prefix}], "usage": {usage}}}\n\n'.encode() + DONE_EVENT

    def _usage_details(self, choices: Sequence[CollectedChoice]) -> dict[str, Any]:
        """More fields of the usage. `choices` are those of a response that is not streamed."""
        return {}

    def whole(self, choices: Sequence[CollectedChoice], prompts: int) -> bytes:
        usage = usage_object([choice.usage for choice in choices], prompts)
        return json.dumps(
            {
                "id": self._head.id,
                "object": self.kind,
                "created": self._head.created,
                "model": self._head.model,
                "system_fingerprint": self._head.system_fingerprint,
                "choices": [
                    {**self._choice(index, choice), **self._whole_extensions(choice)}
                    for index, choice in enumerate(choices)
                ],
                "usage": {**usage, **self._usage_details(choices)},
                **self._whole_fields(choices),
            }
        ).encode()

    def _whole_extensions(self, choice: CollectedChoice) -> dict[str, Any]:
        extensions: dict[str, Any] = {"stop_reason": choice.stop_text or None}
        if self._includes.token_ids:
            extensions["token_ids"] = choice.token_ids
        if choice.latency is not None:
            extensions["latency"] = choice.latency
        return extensions

    def _whole_fields(self, choices: Sequence[CollectedChoice] = ()) -> dict[str, Any]:
        """Fields of the object that OpenAI does not have. `choices` as in `_usage_details`."""
        return {}

    def _prompt_logprobs(self, choices: Sequence[CollectedChoice]) -> dict[str, Any]:
        """The field of the first choice's prompt, if it was requested."""
        if not (choices and self._includes.prompt_logprobs):
            return {}
        first = choices[0]
        found = self._names.prompt_logprobs_of(first.prompt_token_ids, first.prompt_logprobs)
        return {"prompt_logprobs": found}


class ChatFormat(ResponseFormat):
    """The responses of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    text_field = ('"delta": {"content": ', "}")
    lists_beside_top = False

    def __init__(
        self,
        head: ResponseHead,
        codec: TextCodec,
        *,
        includes: Includes = CHOICES_ALONE,
        rules: AnswerRules = _ALL_CONTENT,
    ) -> None:
        super().__init__(head, codec, includes=includes)
        self._sends_texts = self._sends_texts and not rules.divides
        self._rules = rules
        self._answers: dict[int, ChatAnswer] = {}
        self._sent: dict[int, CollectedChoice] = {}
        """What was streamed, where the tokens of its reasoning are counted."""

    def first_event(self, index: int) -> bytes:
        return (
            f'{self._prefix}{{"index": {index}, "delta": {{"role": "assistant", "content": ""}}, '
            f'"logprobs": null, "finish_reason": null}}{self._suffix_of(index, self._whole_fields())}'
        ).encode()

    def event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        if self._rules.reasoning is not None and self._includes.usage:
            self._sent.setdefault(index, CollectedChoice()).add(message, [])
        return super().event(index, message)

    def _delta(self, index: int, message: inference_pb2.GenerateResponse) -> str | None:
        if not self._rules.divides:
            text = message.text
            return f'"delta": {{"content": {quote(text)}}}' if text else '"delta": {}'
        answer = self._answers.get(index)
        if answer is None:
            answer = self._answers[index] = ChatAnswer(self._rules)
        last = bool(message.finish_reason)
        delta = answer.delta(message.text, last=last)
        if not (delta or last or message.logprobs or self._includes.token_ids):
            return None
        return f'"delta": {json.dumps(delta)}'

    def _finish_reason(self, index: int, reason: sampling_pb2.FinishReason.ValueType) -> str | None:
        answer = self._answers.get(index)
        called = bool(reason) and answer is not None and answer.called
        return self._reason_after_calls(reason, called=called)

    def _reason_after_calls(
        self, reason: sampling_pb2.FinishReason.ValueType, *, called: bool
    ) -> str | None:
        # As OpenAI, a call of the function that the request names ends with stop.
        if called and reason == sampling_pb2.FINISH_REASON_STOP and not self._rules.required:
            return "function_call" if self._rules.calls_one_function else "tool_calls"
        return FINISH_REASONS.get(reason)

    def _choice(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        message = whole_message(choice.text, self._rules)
        called = "tool_calls" in message or "function_call" in message
        return {
            "index": index,
            "message": message,
            "logprobs": _chat_logprobs(choice.tokens) if choice.tokens else None,
            "finish_reason": self._reason_after_calls(choice.reason, called=called),
        }

    def _logprobs(
        self, index: int, tokens: list[dict[str, Any]], message: inference_pb2.GenerateResponse
    ) -> dict[str, Any]:
        return _chat_logprobs(tokens)

    def _usage_details(self, choices: Sequence[CollectedChoice]) -> dict[str, Any]:
        counted = choices or self._sent.values()
        return reasoning_details(self._codec, self._rules, counted)

    def _whole_fields(self, choices: Sequence[CollectedChoice] = ()) -> dict[str, Any]:
        ids = {"prompt_token_ids": list(self._prompts[0])} if self._includes.token_ids else {}
        return {**ids, **self._prompt_logprobs(choices)}


def reasoning_details(
    codec: TextCodec, rules: AnswerRules, choices: Iterable[CollectedChoice]
) -> dict[str, Any]:
    """The fields of the usage that count the tokens of reasoning."""
    count = sum(
        tokens_within(
            codec, choice.token_ids, choice.text, ChatAnswer(rules).reasoning_in(choice.text)
        )
        for choice in choices
    )
    return {"completion_tokens_details": {"reasoning_tokens": count}}


def _chat_logprobs(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": tokens, "refusal": None}


def _latency_of(message: inference_pb2.GenerateResponse) -> dict[str, Any] | None:
    timing = message.timing
    return breakdown_object(timing.latency) if timing.HasField("latency") else None


def usage_object(usages: Sequence[inference_pb2.Usage], prompts: int) -> dict[str, Any]:
    """The usage of a response with the choices of `prompts` prompts. Each prompt counts once.

    Only a response with a single choice has a promise.
    """
    per_prompt = len(usages) // prompts
    prompt_tokens = completion_tokens = cached_tokens = stored_tokens = 0
    for number, usage in enumerate(usages):
        completion_tokens += usage.completion_tokens
        if number % per_prompt == 0:
            prompt_tokens += usage.prompt_tokens
            cached_tokens += usage.cached_tokens
            stored_tokens += max(usage.cached_tokens, usage.stored_tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "cache_write_tokens": stored_tokens - cached_tokens,
        },
        **kept_field(usages[0]),
        **receipt_field([usage.receipt for usage in usages]),
    }
