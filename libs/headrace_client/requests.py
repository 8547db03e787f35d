"""Builds requests from plain values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import InvalidRequest


def build_request(
    prompt: str = "",
    *,
    messages: Iterable[tuple[str, str]] = (),
    tokens: Sequence[int] = (),
    model: str = "",
    max_tokens: int = 0,
    temperature: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    request_id: str = "",
) -> inference_pb2.GenerateRequest:
    """A request with one prompt: plain text, messages of (role, content) oldest first, or token ids.

    0 `max_tokens` means what the context leaves. Raises InvalidRequest unless exactly one kind of prompt is given. The
    router validates the rest.
    """
    chat = [inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    if sum(map(bool, (prompt, chat, tokens))) != 1:
        raise InvalidRequest({"prompt": "give exactly one of a text, messages and tokens"})
    sampling = sampling_pb2.SamplingParams(stop=stop)
    if max_tokens:
        sampling.max_tokens = max_tokens
    if temperature is not None:
        sampling.temperature = temperature
    if seed is not None:
        sampling.seed = seed
    request = inference_pb2.GenerateRequest(model=model, sampling=sampling, request_id=request_id)
    if prompt:
        request.text = prompt
    elif chat:
        request.chat.messages.extend(chat)
    else:
        request.tokens.ids.extend(tokens)
    return request
