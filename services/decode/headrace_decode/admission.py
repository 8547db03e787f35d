"""Decides whether a request fits, before anything is spent on it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headrace_common.errors import DecodeFull, DuplicateTransfer, InvalidRequest

RETRY_AFTER_S_MIN = 0.2
RETRY_AFTER_S_MAX = 5.0
SECONDS_PER_REQUEST_AHEAD = 0.05


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one decode worker holds. `usable_blocks` leaves out blocks that the engine keeps for
    itself.
    """

    usable_blocks: int
    block_tokens: int
    context_tokens: int
    max_requests: int

    def blocks_for(self, prompt_tokens: int, max_tokens: int) -> int:
        """Blocks that a prompt and its longest answer take; the context bounds both together."""
        final_tokens = min(prompt_tokens + max_tokens, self.context_tokens)
        return -(-final_tokens // self.block_tokens)


class Admission:
    """Keeps the books of what has been promised: one entry per admitted attempt, until it is
    settled.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._promised_blocks: dict[str, int] = {}
        self._total_blocks = 0

    @property
    def request_count(self) -> int:
        """Attempts admitted and not settled."""
        return len(self._promised_blocks)

    @property
    def reserved_blocks(self) -> int:
        """Blocks promised to them, growth included."""
        return self._total_blocks

    def admit(
        self, transfer_id: str, *, prompt_tokens: int, max_tokens: int, quarantined_blocks: int
    ) -> None:
        """Promises blocks to the attempt, or raises.

        InvalidRequest: the prompt can never fit. DecodeFull: it does not fit now.
        """
        needed = self._needed_blocks(prompt_tokens, max_tokens)
        if len(self._promised_blocks) >= self.capacity.max_requests:
            raise self._full(f"all {self.capacity.max_requests} request slots are taken")
        free = self.capacity.usable_blocks - self._total_blocks - quarantined_blocks
        if needed > free:
            raise self._full(f"{needed} blocks are needed and {max(0, free)} are free")
        self._promised_blocks[transfer_id] = needed
        self._total_blocks += needed

    def settle(self, transfer_id: str) -> None:
        """Takes the promise back: the attempt has ended. Settling twice is harmless."""
        self._total_blocks -= self._promised_blocks.pop(transfer_id, 0)

    def _needed_blocks(self, prompt_tokens: int, max_tokens: int) -> int:
        if prompt_tokens < 1:
            raise InvalidRequest({"token_ids": "must hold at least one token"})
        if prompt_tokens >= self.capacity.context_tokens:
            raise InvalidRequest(
                {
                    "token_ids": "must be shorter than the context of "
                    f"{self.capacity.context_tokens} tokens, "
                    f"but has {prompt_tokens}"
                }
            )
        needed = self.capacity.blocks_for(prompt_tokens, max_tokens)
        if needed > self.capacity.usable_blocks:
            raise InvalidRequest(
                {
                    "token_ids": f"prompt and answer take {needed} blocks and this worker has "
                    f"{self.capacity.usable_blocks} in all: shorten the prompt or lower max_tokens"
                }
            )
        return needed

    def _full(self, why: str) -> DecodeFull:
        waiting_s = SECONDS_PER_REQUEST_AHEAD * len(self._promised_blocks)
        return DecodeFull(
            f"decode worker is full: {why}",
            metadata={"why": why},
            retry_after_s=min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, waiting_s)),
        )


class SeenTransfers:
    """Remembers the last `limit` transfer ids, so that none is used twice."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def check(self, transfer_id: str) -> None:
        """Raises DuplicateTransfer for an id that was remembered."""
        if transfer_id in self._ids:
            raise DuplicateTransfer(
                f"transfer {transfer_id} was used before", metadata={"transfer_id": transfer_id}
            )

    def remember(self, transfer_id: str) -> None:
        """Remembers the id, and forgets the oldest beyond the limit."""
        self._ids[transfer_id] = None
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)
