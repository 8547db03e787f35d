"""Decode computes a prompt's last tokens while prefill computes the others, compared with vLLM alone."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from headrace_common.errors import Cancelled, HeadraceError
from headrace_engine.interface import Arrived, LayersArrived, PrefillWork
from headrace_kv.messages import Reservation
from tests.decoding import decoded
from tests.vllm.conftest import ON_PAIR
from tests.vllm.pair import BLOCK_TOKENS, TIMEOUT_S, Answer, Pair, prompt_of

pytestmark = ON_PAIR

LENGTHS = (65, 100, 128, 300, 513, 700, 1000, 1025, 1300, 1500)
SHARES = (0.1, 0.3, 0.5, 0.7, 0.95)


def block_before(length: int, share: float) -> int:
    """The first token of a block, about so far in the prompt."""
    blocks = int(share * (length - 1) / BLOCK_TOKENS)
    return max(1, blocks) * BLOCK_TOKENS


async def beside(
    pair: Pair, prompt: list[int], computes_from: int, fails_after: int = 0
) -> tuple[Answer, int]:
    """The answer, and the layers that had arrived when decode's first step began.

    With `fails_after`, the transfer fails after so many layers, and there is no answer.
    """
    answer = Answer()
    work = pair.work(prompt, computes_from=computes_from)
    arrivals: list[int] = []
    reader = decoded(pair.decode, work)
    async with asyncio.timeout(TIMEOUT_S):
        reservation = await anext(reader)
        assert isinstance(reservation, Reservation)
        assert reservation.end_token == computes_from
        transfer = pair.reserve(reservation)

        def layers_arrived(layer_count: int) -> None:
            arrivals.extend([time.monotonic_ns()] * (layer_count - len(arrivals)))
            pair.decode.transfer_event(LayersArrived(work.transfer_id, layer_count))
            if layer_count == fails_after:
                pair.receiver.cancel(work.transfer_id, Cancelled.reason, "the test fails it")

        transfer.notify(layers_arrived)
        task = PrefillWork(tuple(prompt[:computes_from]), pair.target(reservation))
        prefill = asyncio.create_task(pair.prefill.prefill(task))
        if fails_after:
            with pytest.raises(HeadraceError):
                await transfer.wait()
            # The service ends the request, and its step need not wait any longer.
            pair.decode.transfer_event(
                LayersArrived(work.transfer_id, pair.decode.descriptor.layout.layer_count)
            )
            await reader.aclose()
            # It may have sent everything before.
            with suppress(HeadraceError):
                await prefill
            return answer, 0
        await transfer.wait()
        pair.decode.transfer_event(Arrived(work.transfer_id))
        async for event in reader:
            answer.take(event)
        await prefill
    return answer, sum(one < answer.step_start_ns for one in arrivals)


@pytest.mark.core
async def test_tokens_equal_plain_vllm_wherever_the_prompt_is_divided(pair: Pair) -> None:
    layers, begun = pair.decode.descriptor.layout.layer_count, []
    for number in range(20):
        length = LENGTHS[number % len(LENGTHS)]
        prompt = prompt_of(length, 100 + number)
        answer, whole = await beside(pair, prompt, block_before(length, SHARES[number % 5]))
        begun.append(whole)
        await pair.reset()
        plain = await pair.plain(prompt)
        await pair.reset()
        assert answer.token_ids == plain.token_ids
        assert answer.end is not None
        assert answer.end.cached_tokens == 0
    # The steps of some began before the prefill engine had computed all layers.
    assert min(begun) < layers
    assert await pair.left_blocks() == [0, 0]


async def test_a_failure_at_each_layer_leaves_no_wrong_kv(pair: Pair) -> None:
    prompt = prompt_of(900, 7)
    plain = await pair.plain(prompt)
    await pair.reset()
    for count in range(1, pair.decode.descriptor.layout.layer_count):
        await beside(pair, prompt, 512, fails_after=count)
        # Without a reset: what the failed request had is not found any more.
        assert (await pair.plain(prompt)).token_ids == plain.token_ids
        await pair.reset()
    assert await pair.left_blocks() == [0, 0]
