"""Decides whether a request fits, before any resources are spent on it."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from headrace_common.callers.priority import Priority
from headrace_common.errors import DecodeFull, DuplicateTransfer, InvalidRequest
from headrace_decode.admission.class_shares import ClassShares
from headrace_decode.admission.completion_time import CompletionTimeEstimator
from headrace_decode.admission.retry_hint import RetryHint
from headrace_kv.layout.layout import CacheGroup

# Callers wait for up to one and a half times the hint.
RETRY_JITTER_MAX = 1.5


@dataclass(frozen=True, slots=True)
class Capacity:
    """The resources of one decode worker. `usable_blocks` excludes the engine's own blocks.

    `windows`: cache groups that take blocks of the same pool, beside the one that keeps a prompt's tokens.
    """

    usable_blocks: int
    block_tokens: int
    max_model_len: int
    max_num_seqs: int
    windows: tuple[CacheGroup, ...] = ()

    def blocks_for(self, prompt_tokens: int, max_tokens: int) -> int:
        """Blocks of a prompt and its longest answer, within the context."""
        final_tokens = prompt_tokens + self.answer_tokens(prompt_tokens, max_tokens)
        of_windows = sum(group.window_blocks(final_tokens) for group in self.windows)
        return -(-final_tokens // self.block_tokens) + of_windows

    def answer_tokens(self, prompt_tokens: int, max_tokens: int) -> int:
        """The longest answer that fits into the context."""
        return min(max_tokens, self.max_model_len - prompt_tokens)


class Admission:
    """Owns the blocks and slots that are reserved for attempts, from `admit` to `release`.

    While other requests are refused, no blocks go to an answer that cannot complete before its
    deadline: it would block the others in vain. `on_admitted` is called for each attempt.
    """

    def __init__(
        self,
        capacity: Capacity,
        clock: Callable[[], float] = time.monotonic,
        on_admitted: Callable[[], None] = lambda: None,
    ) -> None:
        self._capacity = capacity
        self._on_admitted = on_admitted
        self._completion_time = CompletionTimeEstimator()
        self._hint = RetryHint(clock)
        self._clock = clock
        self._contended_until_s = -math.inf
        self._admitted: dict[str, tuple[int, Priority]] = {}
        """Blocks and class by transfer id."""
        self._slot_shares = ClassShares(clock)
        self._block_shares = ClassShares(clock)
        self._total_blocks = 0

    @property
    def request_count(self) -> int:
        """Attempts that were admitted and not released."""
        return len(self._admitted)

    @property
    def reserved_blocks(self) -> int:
        """Blocks reserved for them, for the longest answers."""
        return self._total_blocks

    def admit(
        self,
        transfer_id: str,
        *,
        prompt_tokens: int,
        max_tokens: int,
        quarantined_blocks: int,
        remaining_s: float = math.inf,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """Reserves blocks for the attempt, or raises.

        InvalidRequest: the prompt can never fit. DecodeFull: it does not fit now. Or others were refused recently, and
        the room is kept for their class, or `remaining_s` is too short for the answer.
        """
        needed = self._needed_blocks(prompt_tokens, max_tokens)
        self._check_room(needed, quarantined_blocks, priority)
        self._check_share(needed, priority)
        self._check_time(prompt_tokens, max_tokens, remaining_s)
        self._admitted[transfer_id] = needed, priority
        self._total_blocks += needed
        self._slot_shares.take(priority, 1)
        self._block_shares.take(priority, needed)
        self._on_admitted()

    def answer_completed(
        self,
        *,
        prompt_tokens: int,
        max_tokens: int,
        tokens: int,
        lead_s: float,
        stream_s: float,
    ) -> None:
        """An answer of `tokens` has completed, `stream_s` after its first token, which took `lead_s`."""
        self._completion_time.record(
            lead_s=lead_s,
            stream_s=stream_s,
            tokens=tokens,
            max_tokens=self._capacity.answer_tokens(prompt_tokens, max_tokens),
        )

    def release(self, transfer_id: str) -> None:
        """The attempt has ended: frees its blocks. Idempotent."""
        if transfer_id in self._admitted:
            blocks, priority = self._admitted.pop(transfer_id)
            self._total_blocks -= blocks
            self._slot_shares.give_back(priority, 1)
            self._block_shares.give_back(priority, blocks)
            self._hint.request_completed()

    def _check_room(self, needed: int, quarantined_blocks: int, priority: Priority) -> None:
        free = self._capacity.usable_blocks - self._total_blocks - quarantined_blocks
        if len(self._admitted) >= self._capacity.max_num_seqs:
            refusal = self._full(
                f"all {self._capacity.max_num_seqs} request slots are taken", DecodeFull.SLOTS
            )
        elif needed > free:
            refusal = self._full(f"{needed} blocks are needed and {max(0, free)} are free")
        else:
            return
        retry_s = RETRY_JITTER_MAX * (refusal.retry_after_s or 0.0)
        self._contended_until_s = self._clock() + retry_s
        if refusal.slot_taken:
            self._slot_shares.refused(priority, 1, retry_s)
        else:
            self._block_shares.refused(priority, needed, retry_s)
        raise refusal

    def _check_share(self, needed: int, priority: Priority) -> None:
        """Keeps the room for a class that was refused, if this one already uses more for its weight."""
        for shares, amount, resource in (
            (self._slot_shares, 1, DecodeFull.SLOTS),
            (self._block_shares, needed, DecodeFull.BLOCKS),
        ):
            other = shares.kept_for(priority, amount)
            if other is not None:
                raise self._full(
                    f"the room is kept for a request of class {other.label}, which was refused before",
                    resource,
                )

    def _check_time(self, prompt_tokens: int, max_tokens: int, remaining_s: float) -> None:
        if self._clock() >= self._contended_until_s:
            return
        answer_tokens = self._capacity.answer_tokens(prompt_tokens, max_tokens)
        expected_s = self._completion_time.expected_s(answer_tokens)
        if expected_s > remaining_s:
            raise self._full(
                f"other requests need the room, and of about {expected_s:.2f} s that the answer "
                f"takes only {remaining_s:.2f} s are left; retry with a later deadline",
                DecodeFull.TIME,
            )

    def _needed_blocks(self, prompt_tokens: int, max_tokens: int) -> int:
        if prompt_tokens < 1:
            raise InvalidRequest({"token_ids": "must hold at least one token"})
        if prompt_tokens >= self._capacity.max_model_len:
            raise InvalidRequest(
                {
                    "token_ids": "must be shorter than the context of "
                    f"{self._capacity.max_model_len} tokens, but has {prompt_tokens}"
                }
            )
        needed = self._capacity.blocks_for(prompt_tokens, max_tokens)
        if needed > self._capacity.usable_blocks:
            raise InvalidRequest(
                {
                    "token_ids": f"prompt and answer take {needed} blocks and this worker has "
                    f"{self._capacity.usable_blocks}: shorten the prompt or lower max_tokens"
                }
            )
        return needed

    def _full(self, why: str, resource: str = DecodeFull.BLOCKS) -> DecodeFull:
        return DecodeFull(
            f"decode worker is full: {why}",
            metadata={"why": why, "resource": resource},
            retry_after_s=self._hint.request_refused(),
        )


class SeenTransfers:
    """The last `limit` transfer ids, so that none is used twice."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._ids: OrderedDict[str, None] = OrderedDict()

    def check(self, transfer_id: str) -> None:
        """Raises DuplicateTransfer for a remembered id."""
        if transfer_id in self._ids:
            raise DuplicateTransfer(
                f"transfer {transfer_id} was used before", metadata={"transfer_id": transfer_id}
            )

    def remember(self, transfer_id: str) -> None:
        """Adds an id, and removes the oldest beyond the limit."""
        self._ids[transfer_id] = None
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)
