"""The blocks that a worker of both roles keeps for prompts of others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from headrace_decode.admission import Capacity
from headrace_worker.prompt_room import PromptRoom, prompt_blocks

_CAPACITY = Capacity(usable_blocks=100, block_tokens=16, max_model_len=320, max_num_seqs=8)


@pytest.mark.parametrize(("blocks", "kept"), [(100, 20), (1_000, 125), (30, 15), (1, 0)])
def test_prompts_have_an_eighth_or_the_longest_one(blocks: int, kept: int) -> None:
    capacity = _CAPACITY.without(_CAPACITY.usable_blocks - blocks)
    assert prompt_blocks(capacity) == kept


async def test_prompts_get_blocks_in_the_order_in_which_they_ask() -> None:
    room = PromptRoom(_CAPACITY, 20)
    order: list[str] = []

    async def hold(name: str, tokens: int, until: asyncio.Event) -> None:
        async with room.held(tokens):
            order.append(name)
            await until.wait()

    ends = [asyncio.Event() for _ in range(3)]
    async with asyncio.TaskGroup() as group:
        group.create_task(hold("long", 300, ends[0]))
        await asyncio.sleep(0)
        group.create_task(hold("longer than the room", 3_000, ends[1]))
        await asyncio.sleep(0)
        # It would fit, and waits for its turn all the same.
        group.create_task(hold("short", 16, ends[2]))
        await asyncio.sleep(0)
        assert order == ["long"]
        ends[0].set()
        await asyncio.sleep(0.01)
        assert order == ["long", "longer than the room"]
        ends[1].set()
        await asyncio.sleep(0.01)
        assert order[-1] == "short"
        ends[2].set()


async def test_a_prompt_that_gives_up_takes_no_blocks() -> None:
    room = PromptRoom(_CAPACITY, 20)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(room.held(320))
        waiting = asyncio.create_task(stack.enter_async_context(room.held(320)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1), room.held(320):
        pass
