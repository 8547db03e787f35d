"""Clients that stream past the router go on by themselves when their decode worker goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_client import Client
from headrace_common.errors import Draining, InternalError, WorkerGone
from tests.component.router.dispatch.test_migration import ANSWER, die, give_up, recite
from tests.component.router.fakes import Rig, hand_over

PROMPT = "a prompt"
WHOLE = ANSWER.encode()


@pytest.fixture
async def open_rig() -> AsyncIterator[Rig]:
    """A router that allows look-aside."""
    rig = await Rig(look_aside=True).start()
    yield rig
    await rig.close()


async def answer_of(client: Client, **options: Any) -> list[inference_pb2.GenerateResponse]:
    return [
        response
        async for response in client.generate(
            PROMPT, tokens_only=True, timeout_s=15, max_tokens=len(WHOLE), **options
        )
    ]


def tokens_of(responses: list[inference_pb2.GenerateResponse]) -> bytes:
    return bytes(token for response in responses for token in response.token_ids)


def assert_whole(responses: list[inference_pb2.GenerateResponse], attempts: int) -> None:
    last = responses[-1]
    assert tokens_of(responses) == WHOLE
    assert last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), len(WHOLE))
    assert last.usage.decode_cached_tokens <= len(PROMPT)
    assert last.timing.attempts == attempts
    assert sum(bool(response.trace_id) for response in responses) == 1


async def prefer(rig: Rig, number: int) -> None:
    for index, decode in enumerate(rig.decodes):
        decode.running_requests = 0 if index == number else 7
    await rig.loads_known()


async def test_the_client_goes_on_at_another_worker_by_itself(open_rig: Rig) -> None:
    await open_rig.add_decode(recite(7, die))
    await open_rig.add_decode(recite(99))
    prefill = await open_rig.add_prefill(hand_over)
    await prefer(open_rig, 0)
    async with Client(open_rig.endpoint, look_aside=True) as client:
        assert_whole(await answer_of(client, seed=4), attempts=2)
        assert client.direct_answers == 1
    first, second = (decode.requests[0] for decode in open_rig.decodes)
    assert (first.generated_token_count, second.generated_token_count) == (0, 7)
    assert bytes(second.token_ids) == PROMPT.encode() + WHOLE[:7]
    assert first.sampling == second.sampling
    # Its KV cache is prefilled like any other's.
    assert [bytes(task.token_ids) for task in prefill.tasks] == [
        PROMPT.encode()[:-1],
        (PROMPT.encode() + WHOLE[:7])[:-1],
    ]


async def test_a_worker_that_drains_is_left_and_not_asked_again(open_rig: Rig) -> None:
    leaving = await open_rig.add_decode(recite(5, give_up(Draining("shutting down"))))
    await open_rig.add_decode(recite(99))
    await prefer(open_rig, 0)
    async with Client(open_rig.endpoint, look_aside=True) as client:
        assert_whole(await answer_of(client), attempts=2)
    assert len(leaving.requests) == 1


async def test_when_workers_keep_failing_the_router_goes_on(open_rig: Rig) -> None:
    for _ in range(2):
        await open_rig.add_decode(recite(7, give_up(WorkerGone("as scripted"))))
    async with Client(open_rig.endpoint, look_aside=True) as client:
        responses = await answer_of(client)
        assert tokens_of(responses) == WHOLE
        # Three times seven tokens came directly, the router brought the rest.
        assert client.direct_answers == 0
    asked = sorted(r.generated_token_count for d in open_rig.decodes for r in d.requests)
    assert asked == [0, 7, 14, 21, 28, 35]


async def test_after_the_last_token_nothing_is_generated_again(open_rig: Rig) -> None:
    await open_rig.add_decode(recite(len(WHOLE), die))
    spare = await open_rig.add_decode(recite(99))
    await prefer(open_rig, 0)
    async with Client(open_rig.endpoint, look_aside=True) as client:
        responses = await answer_of(client)
    assert tokens_of(responses) == WHOLE
    assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert responses[-1].usage.completion_tokens == len(WHOLE)
    assert not spare.requests


async def test_a_bug_in_a_worker_ends_the_answer(open_rig: Rig) -> None:
    await open_rig.add_decode(recite(6, give_up(InternalError("as scripted"))))
    spare = await open_rig.add_decode(recite(99))
    await prefer(open_rig, 0)
    async with Client(open_rig.endpoint, look_aside=True) as client:
        with pytest.raises(InternalError):
            await answer_of(client)
    assert not spare.requests
