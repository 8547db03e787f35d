"""Decides whether a request fits, before anything is spent on it."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from headrace_common.errors import DecodeFull, DuplicateTransfer, InvalidRequest
from headrace_decode.completion_time import CompletionTimeEstimator
from headrace_decode.retry_hint import RetryHint

# Who is refused comes again after the time that it is told, and perhaps half as long again.
COMING_BACK = 1.5


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one decode worker holds. `usable_blocks` leaves out blocks that the engine keeps for
    itself.
    """

    usable_blocks: int
    block_tokens: int
    max_model_len: int
    max_num_seqs: int

    def blocks_for(self, prompt_tokens: int, max_tokens: int) -> int:
        """Blocks that a prompt and its longest answer take; the context bounds both together."""
        final_tokens = prompt_tokens + self.answer_tokens(prompt_tokens, max_tokens)
        return -(-final_tokens // self.block_tokens)

    def answer_tokens(self, prompt_tokens: int, max_tokens: int) -> int:
        """The longest answer that the context has room for."""
        return min(max_tokens, self.max_model_len - prompt_tokens)


class Admission:
    """Keeps the books of what has been promised: one entry per admitted attempt, until it is
    settled.

    While others want the room, none is given to an answer that cannot end in time: it would take from them what does
    not help it.
    """

    def __init__(self, capacity: Capacity, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.pace = CompletionTimeEstimator()
        self._hint = RetryHint(clock)
        self._clock = clock
        self._wanted_until_s = -math.inf
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
        self,
        transfer_id: str,
        *,
        prompt_tokens: int,
        max_tokens: int,
        quarantined_blocks: int,
        remaining_s: float = math.inf,
    ) -> None:
        """Promises blocks to the attempt, or raises.

        InvalidRequest: the prompt can never fit. DecodeFull: it does not fit now, or `remaining_s` are too few for its
        answer and others were refused lately.
        """
        needed = self._needed_blocks(prompt_tokens, max_tokens)
        self._check_room(needed, quarantined_blocks)
        self._check_time(prompt_tokens, max_tokens, remaining_s)
        self._promised_blocks[transfer_id] = needed
        self._total_blocks += needed

    def settle(self, transfer_id: str) -> None:
        """Takes the promise back: the attempt has ended. Settling twice is harmless."""
        if transfer_id in self._promised_blocks:
            self._total_blocks -= self._promised_blocks.pop(transfer_id)
            self._hint.ended()

    def _check_room(self, needed: int, quarantined_blocks: int) -> None:
        free = self.capacity.usable_blocks - self._total_blocks - quarantined_blocks
        if len(self._promised_blocks) >= self.capacity.max_num_seqs:
            refusal = self._full(f"all {self.capacity.max_num_seqs} request slots are taken")
        elif needed > free:
            refusal = self._full(f"{needed} blocks are needed and {max(0, free)} are free")
        else:
            return
        self._wanted_until_s = self._clock() + COMING_BACK * (refusal.retry_after_s or 0.0)
        raise refusal

    def _check_time(self, prompt_tokens: int, max_tokens: int, remaining_s: float) -> None:
        if self._clock() >= self._wanted_until_s:
            return
        expected_s = self.pace.expected_s(self.capacity.answer_tokens(prompt_tokens, max_tokens))
        if expected_s > remaining_s:
            raise self._full(
                f"others want the room, and of about {expected_s:.2f} s that the answer takes only "
                f"{remaining_s:.2f} s are left; come with a later deadline"
            )

    def _needed_blocks(self, prompt_tokens: int, max_tokens: int) -> int:
        if prompt_tokens < 1:
            raise InvalidRequest({"token_ids": "must hold at least one token"})
        if prompt_tokens >= self.capacity.max_model_len:
            raise InvalidRequest(
                {
                    "token_ids": "must be shorter than the context of "
                    f"{self.capacity.max_model_len} tokens, "
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
        return DecodeFull(
            f"decode worker is full: {why}",
            metadata={"why": why},
            retry_after_s=self._hint.refused(),
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
