"""Converts OpenAI requests into those of the InferenceService. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import InvalidRequest
from headrace_router.openai.requests import (
    ChatCompletionBody,
    CompletionBody,
    GenerationBody,
    MessageBody,
    Prompt,
    TokenizeBody,
)

_SAME_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
_SEEDS = 2**63


def chat_requests(body: ChatCompletionBody, request_id: str) -> list[inference_pb2.GenerateRequest]:
    """One request for each choice."""
    sampling = _sampling(body)
    if body.max_completion_tokens is not None:
        sampling.max_tokens = body.max_completion_tokens
    if body.logprobs:
        sampling.logprobs = body.top_logprobs or 0
    request = inference_pb2.GenerateRequest(
        model=body.model,
        chat=_chat(body.messages, continue_final_message=body.continue_final_message),
        sampling=sampling,
        request_id=request_id,
    )
    return _choices(request, body.choice_count)


def completion_requests(
    body: CompletionBody, request_id: str
) -> list[inference_pb2.GenerateRequest]:
    """One request for each choice, those of the first prompt first."""
    sampling = _sampling(body)
    if body.logprobs is not None:
        sampling.logprobs = body.logprobs
    requests: list[inference_pb2.GenerateRequest] = []
    for prompt in _prompts(body.prompt):
        request = inference_pb2.GenerateRequest(
            model=body.model, sampling=sampling, request_id=request_id, **prompt
        )
        requests += _choices(request, body.choice_count)
    return requests


def tokenize_request(body: TokenizeBody) -> inference_pb2.GenerateRequest:
    """A request with the prompt to tokenize. Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest({"prompt": "set one of prompt and messages"})
    if body.messages is not None:
        chat = _chat(body.messages, continue_final_message=body.continue_final_message)
        return inference_pb2.GenerateRequest(model=body.model, chat=chat)
    return inference_pb2.GenerateRequest(model=body.model, text=body.prompt)


def openai_violations(violations: Mapping[str, str], *, chat: bool) -> dict[str, str]:
    """The violations of a GenerateRequest, by the names of the OpenAI fields."""
    names = {
        "sampling.max_tokens": "max_completion_tokens" if chat else "max_tokens",
        "sampling.logprobs": "top_logprobs" if chat else "logprobs",
        "tokens.ids": "prompt",
        "text": "prompt",
    }
    renamed: dict[str, str] = {}
    for path, remedy in violations.items():
        field, bracket, index = path.partition("[")
        name = names.get(field) or field.removeprefix("sampling.").removeprefix("chat.")
        renamed[name + bracket + index] = remedy
    return renamed


def _sampling(body: GenerationBody) -> sampling_pb2.SamplingParams:
    sampling = sampling_pb2.SamplingParams(
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        max_tokens=body.max_tokens,
        # vLLM writes -1 for all tokens.
        top_k=None if body.top_k is None else max(0, body.top_k),
    )
    for name in _SAME_NAMES:
        value = getattr(body, name)
        if value is not None:
            setattr(sampling, name, value)
    return sampling


def _chat(messages: list[MessageBody], *, continue_final_message: bool) -> inference_pb2.Chat:
    return inference_pb2.Chat(
        messages=[
            inference_pb2.ChatMessage(role=message.role, content=message.text)
            for message in messages
        ],
        continue_final_message=continue_final_message,
    )


def _prompts(prompt: Prompt) -> Iterator[dict[str, Any]]:
    """The prompt fields of a GenerateRequest, for each prompt."""
    if isinstance(prompt, str):
        yield {"text": prompt}
    elif isinstance(prompt[0], int):
        yield {"tokens": inference_pb2.TokenIds(ids=prompt)}
    else:
        for part in prompt:
            yield from _prompts(part)


def _choices(
    request: inference_pb2.GenerateRequest, count: int
) -> list[inference_pb2.GenerateRequest]:
    """Copies of the request. Each but the first has another seed, if there is one, and another id."""
    choices = [request]
    for index in range(1, count):
        choice = inference_pb2.GenerateRequest()
        choice.CopyFrom(request)
        choice.request_id = f"{request.request_id}-{index}"
        if request.sampling.HasField("seed"):
            choice.sampling.seed = (request.sampling.seed + index) % _SEEDS
        choices.append(choice)
    return choices
