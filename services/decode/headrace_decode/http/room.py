"""Room on the engine for requests of this worker's own clients, beside the requests of routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from headrace.decode.v1 import decode_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, DecodeFull
from headrace_common.tasks import wait_briefly
from headrace_decode.admission import Capacity
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.attempts import Attempts
from headrace_frontend.admission.admission import BoundedResource, Held
from headrace_frontend.admission.fair_share import FairPool
from headrace_frontend.request.validation import PreparedRequest

# Quarantined blocks become free although no attempt ends.
_RECHECK_S: Final = 0.25


class BlockShares:
    """Shares the worker's KV blocks among tenants."""

    def __init__(
        self, capacity: Capacity, weights: Callable[[], Mapping[str, float]], wait_s: float
    ) -> None:
        """`weights`: the current weights of tenants. `wait_s` bounds the wait of requests beyond their share."""
        self._capacity = capacity
        self.pool = FairPool(capacity.usable_blocks, weights, queue_above_share=True)
        self._blocks = BoundedResource("blocks", "KV blocks", self.pool, wait_s)

    async def acquire(self, request: PreparedRequest, deadline: Deadline) -> Held:
        """Blocks for a request. Raises QueueFull or DeadlineExceeded."""
        needed = self._capacity.blocks_for(len(request.token_ids), request.sampling.max_tokens)
        # The engine rejects a request for more blocks than there are.
        blocks = min(needed, self._capacity.usable_blocks)
        return await self._blocks.acquire(request.tenant, blocks, deadline, request.priority)


class RoomQueue:
    """Starts attempts in the order of arrival, each when the engine has room for it."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._last_refusal: DecodeFull | None = None
        attempts.notify_room(self._freed.set)

    async def start(
        self, request: decode_pb2.GenerateRequest, deadline: Deadline, wait_s: float
    ) -> DecodeAttempt:
        """Waits for room, for `wait_s` at most. The caller must end the attempt.

        Raises DecodeFull, or as `Attempts.start_own` does.
        """
        left_s = deadline.remaining_s()
        try:
            async with asyncio.timeout(min(wait_s, left_s)), self._turn:
                return await self._start_first(request, deadline)
        except TimeoutError:
            late = DeadlineExceeded.waiting_for("room beside other requests")
            raise (late if left_s <= wait_s else self._refusal()) from None

    async def _start_first(
        self, request: decode_pb2.GenerateRequest, deadline: Deadline
    ) -> DecodeAttempt:
        while True:
            self._freed.clear()
            try:
                return self._attempts.start_own(request, deadline)
            except DecodeFull as error:
                self._last_refusal = error
            await wait_briefly(self._freed.wait(), _RECHECK_S)

    def _refusal(self) -> DecodeFull:
        """A new error with the reason of the last refusal."""
        last = self._last_refusal
        if last is None:
            return DecodeFull("requests that arrived before wait for room on this decode worker")
        return DecodeFull(last.detail, metadata=last.metadata, retry_after_s=last.retry_after_s)
