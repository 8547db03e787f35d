"""The KV blocks that a worker of both roles keeps for prompts of others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from headrace_decode.admission import Capacity

_SHARE: Final = 8


def prompt_blocks(capacity: Capacity) -> int:
    """An eighth of the worker's blocks, or as many as the longest prompt takes, but at most half of them.

    Its own requests never get them. Else two workers could both be full of requests, and neither would have blocks for
    the prompts of the other one.
    """
    longest = capacity.blocks_for(capacity.max_model_len, 0)
    return min(max(longest, capacity.usable_blocks // _SHARE), capacity.usable_blocks // 2)


class PromptRoom:
    """Gives blocks to prompts, in the order in which they ask. One event loop owns it."""

    def __init__(self, capacity: Capacity, block_count: int) -> None:
        """`block_count` blocks of `capacity`."""
        self._capacity = capacity
        self._free = self._total = block_count
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, prompt_tokens: int) -> AsyncIterator[None]:
        """Within this context the prompt has blocks. A prompt that needs all of them has them alone."""
        needed = min(self._capacity.blocks_for(prompt_tokens, 0), self._total)
        await self._take(needed)
        try:
            yield
        finally:
            self._give_back(needed)

    async def _take(self, needed: int) -> None:
        if not self._waiting and needed <= self._free:
            self._free -= needed
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((needed, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(needed)
            else:
                self._waiting.remove((needed, turn))
                self._wake()
            raise

    def _give_back(self, blocks: int) -> None:
        self._free += blocks
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            needed, turn = self._waiting.popleft()
            self._free -= needed
            turn.set_result(None)
