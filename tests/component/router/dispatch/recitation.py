"""Decode workers that generate one fixed completion, each from wherever the request continues it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from tests.component.router.fakes import FakeDecode, Script, reserved

TEXT = "Grüße aus dem Süden, und gute Nacht."
TOKENS = TEXT.encode()

Ending: TypeAlias = Callable[[FakeDecode], Awaitable[Any]]


def recite(token_count: int, then: Ending | None = None) -> Script:
    """Sends at most `token_count` tokens of the completion, then Finished or what `then` does."""

    async def script(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
        start = request.generated_token_count
        yield reserved(request)
        if request.remote_prefill:
            await worker.handoff.of(request.transfer_id).wait()
        earlier = worker.read_tokens.count
        recited = TOKENS[: request.sampling.max_tokens][start : start + token_count]
        for token in recited:
            logprob = sampling_pb2.TokenLogprobs(logprob=-token)
            logprobs = [logprob] if request.sampling.logprobs else []
            yield decode_pb2.Tokens(token_ids=[token], logprobs=logprobs)
        if then is not None:
            await worker.read_tokens.reach(earlier + len(recited))
            await then(worker)
        else:
            yield decode_pb2.Finished(
                reason=sampling_pb2.FINISH_REASON_LENGTH, cached_tokens=start + 3
            )

    return script


def raising(error: Exception) -> Ending:
    """Ends the stream with `error`."""

    async def ending(worker: FakeDecode) -> None:
        raise error

    return ending


def sampling(**fields: Any) -> sampling_pb2.SamplingParams:
    """Parameters of a request for the whole completion."""
    return sampling_pb2.SamplingParams(max_tokens=len(TOKENS), **fields)
