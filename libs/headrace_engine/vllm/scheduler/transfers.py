"""The transfers of one request, as a scheduler knows them. Uses no vLLM types."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace_kv.handoff.messages import Reservation, TransferTarget


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part of a step: the tokens [computed_tokens, computed_tokens + step_tokens).

    `block_ids` are by group of vLLM, and empty when there are no new ones. They replace the known ones
    when `replaces_blocks`, else they are appended.
    """

    request_id: str
    computed_tokens: int
    step_tokens: int
    block_ids: Sequence[Sequence[int]]
    replaces_blocks: bool


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The KV of a request's tokens below `end_token`, which was cached. `block_ids` are by group of the layout.

    `step` is the number of the step in which the request got these blocks. The tokens from `loaded_token` on are on
    their way from lower tiers.
    """

    block_ids: tuple[tuple[int, ...], ...]
    end_token: int
    step: int
    loaded_token: int


@dataclass(slots=True)
class Receive:
    """An incoming transfer that a request waits for.

    `add_token` appends the first token to a request that awaits it. It is None where no first token is awaited.
    `overlap_deadline_s`: the transfer's deadline once only its last layers are missing, 0 before that.
    `cached`: what the request has before the reserved tokens, and may send.
    """

    request_id: str
    reservation: Reservation
    add_token: Callable[[int], None] | None = None
    cached: CachedPrefix | None = None
    whole: bool = False
    overlap_deadline_s: float = 0.0
    cancelled: bool = False

    @property
    def ready(self) -> bool:
        """Whether the request may run."""
        return self.add_token is None and (self.whole or self.overlap_deadline_s > 0)

    @property
    def token_count(self) -> int:
        """The tokens that the transfer carries."""
        return self.reservation.end_token - self.reservation.start_token

    def arrive(self) -> None:
        self.whole = True

    def start_overlap(self, deadline_s: float) -> None:
        if not self.cancelled:
            self.overlap_deadline_s = deadline_s

    def add_first_token(self, token_id: int) -> None:
        if self.add_token is not None:
            self.add_token(token_id)
            self.add_token = None

    def prefix_sent(self) -> None:
        """What was cached is sent. It is sent once."""
        self.cached = None

    def cancel(self) -> None:
        """The request has ended: it only waits until no sender writes into its blocks."""
        self.add_token = self.cached = None
        self.cancelled, self.overlap_deadline_s = True, 0.0


@dataclass(slots=True)
class Send:
    """An outgoing transfer. `planned_tokens`: one past the last token that was handed to the ranks.

    Of the tokens that its request did not compute, `fetched_tokens` came by another transfer. It may open before its
    request runs.
    """

    target: TransferTarget
    planned_tokens: int
    opened: bool = False
    cached_tokens: int = 0
    fetched_tokens: int = 0
    start_unix_ns: int = 0
    overrun: bool = False
    block_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    @property
    def runs(self) -> bool:
        """Whether a step has computed for the request."""
        return self.start_unix_ns > 0

    def prefix_fetched(self, token_count: int) -> None:
        self.fetched_tokens = token_count

    def open(self) -> None:
        self.opened = True

    def run(self, known_tokens: int) -> None:
        """The first step with the request begins. It has the KV of so many tokens."""
        self.start_unix_ns = time.time_ns()
        self.cached_tokens = known_tokens - self.fetched_tokens

    def update_blocks(self, request: ScheduledRequest) -> None:
        if request.replaces_blocks:
            self.block_ids.clear()
        for index, block_ids in enumerate(request.block_ids):
            self.block_ids[index].extend(block_ids)

    def mark_overrun(self) -> None:
        self.overrun = True

    def plan_until(self, end_token: int) -> None:
        self.planned_tokens = end_token
