"""The transfers of requests as a scheduler knows them, and the blocks that they hold. Uses no vLLM types."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace_kv.messages import Reservation, TransferTarget


@dataclass(frozen=True, slots=True)
class ReceiveParams:
    """For a decode request. A prefill worker sends its KV, with `awaits_first_token` also of the last token.

    With `computes_from`, only that of the tokens before, see DecodeWork.
    """

    transfer_id: str
    awaits_first_token: bool = False
    computes_from: int = 0


@dataclass(frozen=True, slots=True)
class PrefixParams:
    """For a prefill request: its decode worker has the KV of the tokens before `end_token`.

    Fewer than `least_tokens` of them are not fetched. Transfer `transfer_id` brings them.
    """

    transfer_id: str
    end_token: int
    least_tokens: int

    def missing_tokens(self, cached_tokens: int) -> int:
        """How many tokens are fetched after the cached ones."""
        missing = self.end_token - cached_tokens
        return missing if missing >= max(1, self.least_tokens) else 0


@dataclass(frozen=True, slots=True)
class SendParams:
    """For a prefill request, which may fetch a `prefix`. `cached_only`: see PrefillWork."""

    target: TransferTarget
    prefix: PrefixParams | None = None
    cached_only: bool = False


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Times of a finished prefill on its scheduler, in nanoseconds since the Unix epoch.

    `fetched_tokens` are not among the `cached_tokens`.
    """

    cached_tokens: int
    compute_start_unix_ns: int
    compute_end_unix_ns: int
    fetched_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part of a step: the tokens [computed_tokens, computed_tokens + step_tokens).

    Drafts that the step verifies are not among them. With steps planned ahead, `computed_tokens` counts those of the
    step before. `block_ids` are by group of vLLM, and empty when there are no new ones. They replace the known ones
    when `replaces_blocks`, else they are appended.
    """

    request_id: str
    computed_tokens: int
    step_tokens: int
    block_ids: Sequence[Sequence[int]]
    replaces_blocks: bool


@dataclass(slots=True)
class Receive:
    """An incoming transfer that a request waits for.

    `add_token` appends the first token to a request that awaits it. It is None where no first token is awaited.
    """

    request_id: str
    reservation: Reservation
    add_token: Callable[[int], None] | None = None
    whole: bool = False
    ended: bool = False
    """Its request has ended."""

    @property
    def ready(self) -> bool:
        """Whether the request may run."""
        return self.add_token is None and self.whole

    @property
    def token_count(self) -> int:
        """The tokens that the transfer carries."""
        return self.reservation.end_token - self.reservation.start_token

    def arrive(self) -> None:
        self.whole = True

    def add_first_token(self, token_id: int) -> None:
        if self.add_token is not None:
            self.add_token(token_id)
            self.add_token = None

    def cancel(self) -> None:
        """The request has ended: it only waits until no sender writes into its blocks."""
        self.add_token, self.ended = None, True


@dataclass(slots=True)
class Send:
    """An outgoing transfer. `planned_tokens`: one past the last token that was handed to the ranks.

    Of the tokens that its request did not compute, `fetched_tokens` came by another transfer. It may open before its
    request runs. `cached_only`: all of its tokens are cached, see PrefillWork.
    """

    target: TransferTarget
    planned_tokens: int
    cached_only: bool = False
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

    def take_part(self, request: ScheduledRequest) -> None:
        """A step has its request."""
        if request.replaces_blocks:
            self.block_ids.clear()
        for index, block_ids in enumerate(request.block_ids):
            self.block_ids[index].extend(block_ids)
        if not self.runs:
            self.run(request.computed_tokens)

    def mark_overrun(self) -> None:
        self.overrun = True

    def plan_until(self, end_token: int) -> None:
        self.planned_tokens = end_token


class HoldableBlocks(Protocol):
    """The blocks of an engine, by group as in the requests' block lists."""

    def hold(self, block_ids_by_group: Sequence[Sequence[int]]) -> None:
        """Adds one holder to each block, so that it is neither reused nor evicted."""

    def release(self, block_ids_by_group: Sequence[Sequence[int]]) -> None:
        """Takes that holder away."""


class BlockHolds:
    """Blocks that a transfer may still write, under its name. The scheduling thread calls all methods.

    A held block has one holder more, as if another request shared it, whatever becomes of its request.
    """

    def __init__(self) -> None:
        self._blocks: HoldableBlocks | None = None
        self._held: dict[str, Sequence[Sequence[int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def bind(self, blocks: HoldableBlocks) -> None:
        """Sets the blocks, once."""
        self._blocks = blocks

    def hold(self, name: str, block_ids_by_group: Sequence[Sequence[int]]) -> None:
        """Holds blocks that a request holds now, until `release`."""
        assert self._blocks is not None
        assert name not in self._held
        self._blocks.hold(block_ids_by_group)
        self._held[name] = block_ids_by_group

    def release(self, name: str) -> None:
        """Ignores unknown names."""
        held = self._held.pop(name, ())
        if held and self._blocks is not None:
            self._blocks.release(held)


class PartialReceives:
    """Incoming transfers of requests that run while layers are on their way. The scheduling thread calls all methods.

    `receives` has them until they are whole or their requests leave. Until then, no other request may share the blocks.
    """

    def __init__(self, holds: BlockHolds) -> None:
        self._holds = holds
        self.receives: dict[str, Receive] = {}
        # Those that have failed. Their requests end. Until then, their blocks have wrong KV.
        self._lost: set[str] = set()

    @property
    def awaited(self) -> list[str]:
        """The transfers with layers that a step waits for."""
        return [one for one in self.receives if one not in self._lost]

    def add(self, transfer_id: str, receive: Receive) -> None:
        """The request of a transfer may run: its first layer is whole."""
        self.receives[transfer_id] = receive

    def settle(self, transfer_id: str, whole: bool) -> list[str]:
        """Nothing writes any more for a transfer, its request may have left. Returns the request that is whole."""
        if transfer_id not in self.receives:
            self._holds.release(transfer_id)
        elif whole:
            return [self.receives.pop(transfer_id).request_id]
        else:
            self._lost.add(transfer_id)
        return []

    def leave(self, request_id: str) -> int | None:
        """A request gives up its blocks. The first token of which these lack KV, None without one.

        What may still be written is held until the transfer has settled (I1).
        """
        for transfer_id, receive in self.receives.items():
            if receive.request_id == request_id:
                del self.receives[transfer_id]
                if transfer_id not in self._lost:
                    self._holds.hold(transfer_id, receive.reservation.block_ids_by_group)
                self._lost.discard(transfer_id)
                return receive.reservation.start_token
        return None
