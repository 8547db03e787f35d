"""Builds requests from plain values. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypedDict, Unpack

from headrace.inference.v1 import inference_pb2, priority_pb2, sampling_pb2, tools_pb2
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import InvalidRequest

Message: TypeAlias = tuple[str, str] | Mapping[str, Any] | inference_pb2.ChatMessage
"""(role, content), a mapping with the fields of ChatMessage or of OpenAI's messages, or a whole message."""
Messages: TypeAlias = str | Iterable[Message]
"""Messages, oldest first. A text is one message of role user."""


_MESSAGE_REMEDY = (
    "give a text, or for each message a pair of role and content, a mapping such as "
    '{"role": "user", "content": "Hello"}, or a ChatMessage'
)


_SAMPLING_FIELDS = sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name.keys()


class SamplingFields(TypedDict, total=False):
    """Fields of SamplingParams, which describes them. None and absent mean its defaults."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    structured_outputs: sampling_pb2.StructuredOutputs


class RequestFields(SamplingFields, total=False):
    """What build_request takes beside the prompt."""

    messages: Messages
    tokens: Sequence[int]
    tools: Iterable[tools_pb2.Tool]
    model: str
    request_id: str
    n: int
    include_latency: bool
    ttft_target_s: float | None
    tpot_target_s: float | None
    keep_s: float | None
    priority: priority_pb2.Priority.ValueType


def build_request(  # noqa: PLR0913 - every argument is one of the caller's
    prompt: str = "",
    *,
    messages: Messages = (),
    tokens: Sequence[int] = (),
    tools: Iterable[tools_pb2.Tool] = (),
    model: str = "",
    request_id: str = "",
    n: int = 1,
    include_latency: bool = False,
    ttft_target_s: float | None = None,
    tpot_target_s: float | None = None,
    keep_s: float | None = None,
    priority: priority_pb2.Priority.ValueType = priority_pb2.PRIORITY_UNSPECIFIED,
    **sampling: Unpack[SamplingFields],
) -> inference_pb2.GenerateRequest:
    """A request with one prompt: plain text, messages oldest first, or token ids. `tools` go with messages.

    Without `max_tokens`, an answer has what the context leaves. `n` is the number of answers. With
    `include_latency`, the last response has the parts of the time to the first token, as `timing.latency`. With
    `ttft_target_s`, the router refuses a request at once when it predicts a later first token. `tpot_target_s` is
    the mean time that each further token may take. With `keep_s`, the KV of the answer shall stay for so long after
    it: the last response has `usage.kept`. `priority` is a class that the tenant may use. Raises InvalidRequest
    unless exactly one kind of prompt is given, and for values of the wrong type. The router validates the rest.
    """
    try:
        chat = messages_of(messages)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise InvalidRequest({"messages": _MESSAGE_REMEDY}) from error
    if sum(map(bool, (prompt, chat, tokens))) != 1:
        raise InvalidRequest({"prompt": "give exactly one of a text, messages and tokens"})
    given = {name: value for name, value in sampling.items() if value is not None}
    for name in given.keys() - _SAMPLING_FIELDS:
        near = difflib.get_close_matches(name, _SAMPLING_FIELDS, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else "the fields of SamplingParams are its keywords"
        )
        raise InvalidRequest({name: f"is no keyword: {hint}"})
    try:
        request = inference_pb2.GenerateRequest(
            model=model,
            request_id=request_id,
            n=n if n != 1 else 0,
            include_latency=include_latency,
            ttft_target=None if ttft_target_s is None else duration_from_seconds(ttft_target_s),
            tpot_target=None if tpot_target_s is None else duration_from_seconds(tpot_target_s),
            keep=None if keep_s is None else duration_from_seconds(keep_s),
            priority=priority,
            sampling=sampling_pb2.SamplingParams(**given),  # type: ignore[arg-type]
        )
        if prompt:
            request.text = prompt
        elif chat:
            request.chat.messages.extend(chat)
            request.chat.tools.extend(tools)
        else:
            request.tokens.ids.extend(tokens)
    except (TypeError, ValueError) as error:
        name = next(filter(partial(_misfits, given), given), "request")
        raise InvalidRequest({name: f"has a wrong value: {error}"}) from error
    return request


def _misfits(given: Mapping[str, Any], name: str) -> bool:
    try:
        sampling_pb2.SamplingParams(**{name: given[name]})
    except (TypeError, ValueError):
        return True
    return False


def messages_of(messages: Messages) -> list[inference_pb2.ChatMessage]:
    """The messages of the contract. Raises TypeError, ValueError, AttributeError or KeyError for other values."""
    return list(map(_message, [("user", messages)] if isinstance(messages, str) else messages))


def _message(message: Message) -> inference_pb2.ChatMessage:
    if isinstance(message, inference_pb2.ChatMessage):
        return message
    if not isinstance(message, Mapping):
        role, content = message
        return inference_pb2.ChatMessage(role=role, content=content)
    fields = {name: value for name, value in message.items() if value is not None}
    fields["tool_calls"] = [_tool_call(call) for call in fields.get("tool_calls", ())]
    content = fields.get("content", "")
    if not isinstance(content, str):
        fields["content"] = "\n".join(part["text"] for part in content)
    return inference_pb2.ChatMessage(**fields)


def _tool_call(call: Any) -> tools_pb2.ToolCall:
    if isinstance(call, tools_pb2.ToolCall):
        return call
    function = call.get("function", call)
    return tools_pb2.ToolCall(
        id=call.get("id", ""), name=function["name"], arguments=function.get("arguments", "")
    )
