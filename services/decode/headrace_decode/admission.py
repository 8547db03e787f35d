"""Decides whether a request fits, before any resources are spent on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from headrace_common.errors import DecodeFull, DuplicateTransfer, InvalidRequest
from headrace_common.tasks import Recent
from headrace_kv.layout import CacheGroup

HINT_S_MIN: Final = 0.2
HINT_S_MAX: Final = 5.0
# More retries fill a free slot no sooner; fewer leave it empty for a while.
RETRIES_PER_COMPLETION: Final = 4
_WINDOW_S: Final = 0.5
_STEP_FACTOR_MAX: Final = 2.0


class RetryHint:
    """Grows while there are more than RETRIES_PER_COMPLETION refusals per completion; else shrinks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hint_s = HINT_S_MIN
        self._window_start_s = clock()
        self._refusals = 0
        self._completions = 0

    def request_completed(self) -> None:
        """A slot is free again."""
        self._completions += 1

    def request_refused(self) -> float:
        """A request was refused. Returns the seconds after which its caller should retry."""
        self._refusals += 1
        now_s = self._clock()
        elapsed_s = now_s - self._window_start_s
        if elapsed_s >= _WINDOW_S:
            wanted = RETRIES_PER_COMPLETION * max(1, self._completions)
            factor = min(_STEP_FACTOR_MAX, max(1 / _STEP_FACTOR_MAX, self._refusals / wanted))
            # After such a pause, all callers with an old hint have retried.
            hint_s = self._hint_s * factor if elapsed_s < HINT_S_MAX else HINT_S_MIN
            self._hint_s = min(HINT_S_MAX, max(HINT_S_MIN, hint_s))
            self._window_start_s, self._refusals, self._completions = now_s, 0, 0
        return self._hint_s


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

    def without(self, blocks: int) -> Capacity:
        """The same with fewer blocks."""
        return replace(self, usable_blocks=self.usable_blocks - blocks)

    def blocks_for(self, prompt_tokens: int, max_tokens: int) -> int:
        """Blocks of a prompt and its longest answer, within the context."""
        final_tokens = prompt_tokens + self.answer_tokens(prompt_tokens, max_tokens)
        of_windows = sum(group.window_blocks(final_tokens) for group in self.windows)
        return -(-final_tokens // self.block_tokens) + of_windows

    def answer_tokens(self, prompt_tokens: int, max_tokens: int) -> int:
        """The longest answer that fits into the context."""
        return min(max_tokens, self.max_model_len - prompt_tokens)


class BlockAdmission:
    """Owns the blocks and slots that are reserved for attempts, from `admit` to `release`.

    `on_admitted` is called for each attempt.
    """

    def __init__(
        self,
        capacity: Capacity,
        clock: Callable[[], float] = time.monotonic,
        on_admitted: Callable[[], None] = lambda: None,
    ) -> None:
        self._capacity = capacity
        self._on_admitted = on_admitted
        self._hint = RetryHint(clock)
        self._admitted: dict[str, int] = {}
        """Blocks by transfer id."""
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
    ) -> None:
        """Reserves blocks for the attempt, or raises.

        InvalidRequest: the prompt can never fit. DecodeFull: it does not fit now.
        """
        needed = self.check(prompt_tokens, max_tokens, quarantined_blocks)
        self._admitted[transfer_id] = needed
        self._total_blocks += needed
        self._on_admitted()

    def check(self, prompt_tokens: int, max_tokens: int, quarantined_blocks: int) -> int:
        """The blocks that a request needs. Raises as `admit` does."""
        needed = self._needed_blocks(prompt_tokens, max_tokens)
        self._check_room(needed, quarantined_blocks)
        return needed

    def release(self, transfer_id: str) -> None:
        """The attempt has ended: frees its blocks. Idempotent."""
        if transfer_id in self._admitted:
            self._total_blocks -= self._admitted.pop(transfer_id)
            self._hint.request_completed()

    def _check_room(self, needed: int, quarantined_blocks: int) -> None:
        free = self._capacity.usable_blocks - self._total_blocks - quarantined_blocks
        if len(self._admitted) >= self._capacity.max_num_seqs:
            raise self._full(
                f"all {self._capacity.max_num_seqs} request slots are taken", DecodeFull.SLOTS
            )
        if needed > free:
            raise self._full(
                f"{needed} blocks are needed and {max(0, free)} are free", DecodeFull.BLOCKS
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

    def _full(self, why: str, resource: str) -> DecodeFull:
        return DecodeFull(
            f"decode worker is full: {why}",
            metadata={"why": why, "resource": resource},
            retry_after_s=self._hint.request_refused(),
        )


class SeenTransfers:
    """The last `limit` transfer ids, so that none is used twice."""

    def __init__(self, limit: int = 65_536) -> None:
        self._ids: Recent[str, None] = Recent(limit)

    def check(self, transfer_id: str) -> None:
        """Raises DuplicateTransfer for a remembered id."""
        if transfer_id in self._ids:
            raise DuplicateTransfer(
                f"transfer {transfer_id} was used before", metadata={"transfer_id": transfer_id}
            )

    def remember(self, transfer_id: str) -> None:
        """Adds an id, and removes the oldest beyond the limit."""
        self._ids[transfer_id] = None
