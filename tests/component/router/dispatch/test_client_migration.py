"""Clients with look-aside continue at another decode worker when theirs is lost."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_client import Client
from headrace_common.errors import Draining, InternalError, WorkerGone
from tests.component.router.dispatch.recitation import TOKENS, raising, recite
from tests.component.router.fakes import FakeDecode, Rig, hand_over, with_settings

pytestmark = with_settings(look_aside=True)

PROMPT = "a prompt"


async def responses_of(client: Client, **options: Any) -> list[inference_pb2.GenerateResponse]:
    return [
        response
        async for response in client.generate(
            PROMPT, tokens_only=True, timeout_s=15, max_tokens=len(TOKENS), **options
        )
    ]


def tokens_of(responses: list[inference_pb2.GenerateResponse]) -> bytes:
    return bytes(token for response in responses for token in response.token_ids)


def assert_whole(responses: list[inference_pb2.GenerateResponse], attempts: int) -> None:
    last = responses[-1]
    assert tokens_of(responses) == TOKENS
    assert last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), len(TOKENS))
    assert last.usage.decode_cached_tokens <= len(PROMPT)
    assert last.timing.attempts == attempts
    assert sum(bool(response.trace_id) for response in responses) == 1


async def test_the_client_continues_at_another_worker(rig: Rig) -> None:
    await rig.add_decodes(recite(7, FakeDecode.die), recite(99))
    prefill = await rig.add_prefill(hand_over)
    async with Client(rig.endpoint, look_aside=True) as client:
        assert_whole(await responses_of(client, seed=4), attempts=2)
        assert client.direct_answers == 1
    first, second = (decode.requests[0] for decode in rig.decodes)
    assert (first.generated_token_count, second.generated_token_count) == (0, 7)
    assert bytes(second.token_ids) == PROMPT.encode() + TOKENS[:7]
    assert first.sampling == second.sampling
    # The second attempt is prefilled remotely, too.
    assert [bytes(task.token_ids) for task in prefill.tasks] == [
        PROMPT.encode()[:-1],
        (PROMPT.encode() + TOKENS[:7])[:-1],
    ]


async def test_a_draining_worker_gets_no_second_request(rig: Rig) -> None:
    leaving, _ = await rig.add_decodes(recite(5, raising(Draining("bye"))), recite(99))
    async with Client(rig.endpoint, look_aside=True) as client:
        assert_whole(await responses_of(client), attempts=2)
    assert len(leaving.requests) == 1


async def test_after_repeated_failures_the_router_continues(rig: Rig) -> None:
    for _ in range(2):
        await rig.add_decode(recite(7, raising(WorkerGone("as scripted"))))
    async with Client(rig.endpoint, look_aside=True) as client:
        responses = await responses_of(client)
        assert tokens_of(responses) == TOKENS
        # Three times seven tokens came directly, the rest through the router.
        assert client.direct_answers == 0
    starts = sorted(r.generated_token_count for d in rig.decodes for r in d.requests)
    assert starts == [0, 7, 14, 21, 28, 35]


async def test_nothing_is_generated_after_the_last_token(rig: Rig) -> None:
    _, spare = await rig.add_decodes(recite(len(TOKENS), FakeDecode.die), recite(99))
    async with Client(rig.endpoint, look_aside=True) as client:
        responses = await responses_of(client)
    assert tokens_of(responses) == TOKENS
    assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert responses[-1].usage.completion_tokens == len(TOKENS)
    assert not spare.requests


async def test_an_internal_error_of_a_worker_ends_the_response(rig: Rig) -> None:
    _, spare = await rig.add_decodes(recite(6, raising(InternalError("a bug"))), recite(99))
    async with Client(rig.endpoint, look_aside=True) as client:
        with pytest.raises(InternalError):
            await responses_of(client)
    assert not spare.requests
