"""The transfers of requests as a scheduler knows them, and the blocks that they hold. Uses no vLLM types.

Requests run before the last layers of their KV have arrived, and vLLM takes them for fully loaded. If one ends before
its transfer has settled, its blocks must not be reused (I1) and must leave the prefix cache. Until then, new requests
must not share its blocks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace_engine.vllm.step_plan import OverlappedLoad
from headrace_kv.handoff.messages import Reservation, TransferTarget

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager


@dataclass(slots=True)
class _Overlapped:
    """`started`: it was in a step. `finished`: the request has ended.

    `received`: vLLM has handled that it may run. `settled`: no sender writes any more. `lost`: its transfer has failed.
    `loss_planned`: a step's plan has reported that to the ranks.
    """

    request_id: str
    block_ids: tuple[int, ...]
    deadline_s: float
    started: bool = False
    finished: bool = False
    received: bool = False
    settled: bool = False
    lost: bool = False
    loss_planned: bool = False

    def mark_started(self) -> None:
        self.started = True

    def mark_finished(self) -> None:
        self.finished = True

    def mark_received(self) -> None:
        self.received = True

    def mark_settled(self) -> None:
        self.settled = True

    def mark_lost(self) -> None:
        self.lost = True

    def plan_load(self, transfer_id: str) -> OverlappedLoad:
        self.loss_planned = self.lost
        return OverlappedLoad(transfer_id, self.block_ids, self.deadline_s, self.lost)


class OverlappedRequests:
    """False when there are none."""

    def __init__(self) -> None:
        self._evict: Callable[[set[int]], None] = lambda block_ids: None
        self._by_transfer: dict[str, _Overlapped] = {}

    def __bool__(self) -> bool:
        return bool(self._by_transfer)

    @property
    def prefix_cache_incomplete(self) -> bool:
        """Whether the prefix cache may hold blocks with KV that has not fully arrived."""
        return any(not one.finished for one in self._by_transfer.values())

    def bind_eviction(self, evict: Callable[[set[int]], None]) -> None:
        """Sets the function that removes blocks from the prefix cache, by block id."""
        self._evict = evict

    def add(
        self,
        transfer_id: str,
        request_id: str,
        block_ids: tuple[int, ...],
        deadline_s: float,
    ) -> None:
        """vLLM takes the request for loaded, though its last layers are missing."""
        self._by_transfer[transfer_id] = _Overlapped(request_id, block_ids, deadline_s)

    def transfer_settled(self, transfer_id: str, whole: bool) -> str | None:
        """No sender writes for a transfer any more. Ignores unknown transfers.

        Returns the id of a request that has ended meanwhile: its blocks are now free.
        """
        one = self._by_transfer.get(transfer_id)
        if one is None:
            return None
        if not one.finished and not whole:
            # The next step that contains the request reports its blocks as invalid.
            one.mark_lost()
            return None
        if one.finished and not one.received:
            # vLLM is about to handle that it was received, and frees its blocks then.
            one.mark_settled()
            return None
        del self._by_transfer[transfer_id]
        return one.request_id if one.finished else None

    def request_finished(self, request_id: str) -> bool:
        """The request has ended. True when its blocks must stay until its transfer has settled."""
        for transfer_id, one in self._by_transfer.items():
            if one.request_id == request_id:
                self._evict(set(one.block_ids))
                one.mark_finished()
                if one.lost:
                    del self._by_transfer[transfer_id]
                return not one.lost
        return False

    def withheld(self, received: Iterable[str]) -> set[str]:
        """The requests among `received` that ended before vLLM handled that ranks reported them as received.

        vLLM would free their blocks. They stay until their transfer has settled, as in `request_finished`.
        """
        reported, withheld = set(received), set[str]()
        for transfer_id, one in list(self._by_transfer.items()):
            if one.request_id not in reported:
                continue
            one.mark_received()
            if one.settled:
                del self._by_transfer[transfer_id]
            elif one.finished:
                withheld.add(one.request_id)
        return withheld

    def plan_step(self, scheduled_request_ids: Iterable[str]) -> list[OverlappedLoad]:
        """The transfers that the step may have to wait for."""
        if not self._by_transfer:
            return []
        scheduled = set(scheduled_request_ids)
        loads: list[OverlappedLoad] = []
        for transfer_id, one in self._by_transfer.items():
            if one.request_id in scheduled:
                one.mark_started()
            # A loss is reported once. vLLM then ends the request, perhaps after it has planned another step with it.
            if one.started and not one.finished and not one.loss_planned:
                loads.append(one.plan_load(transfer_id))
        return loads


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


@dataclass(slots=True)
class Receive:
    """An incoming transfer that a request waits for.

    `add_token` appends the first token to a request that awaits it. It is None where no first token is awaited.
    `overlap_deadline_s`: the transfer's deadline once only its last layers are missing, 0 before that.
    """

    request_id: str
    reservation: Reservation
    add_token: Callable[[int], None] | None = None
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

    def cancel(self) -> None:
        """The request has ended: it only waits until no sender writes into its blocks."""
        self.add_token = None
        self.cancelled, self.overlap_deadline_s = True, 0.0


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

    def update_blocks(self, request: ScheduledRequest) -> None:
        if request.replaces_blocks:
            self.block_ids.clear()
        for index, block_ids in enumerate(request.block_ids):
            self.block_ids[index].extend(block_ids)

    def mark_overrun(self) -> None:
        self.overrun = True

    def plan_until(self, end_token: int) -> None:
        self.planned_tokens = end_token


class BlockHolds:
    """Blocks that a transfer may still write, under its name. The scheduling thread calls all methods.

    A held block has one reference more, as if another request shared it. So vLLM neither reuses nor evicts it, whatever
    becomes of its request.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[str, tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Sets the pool, once."""
        self._pool = kv_cache_manager.block_pool

    def hold(self, name: str, block_ids: Iterable[int]) -> None:
        """Holds blocks that a request holds now, until `release`."""
        assert self._pool is not None
        assert name not in self._held
        blocks = [block for one in block_ids if not (block := self._pool.blocks[one]).is_null]
        self._pool.touch(blocks)
        self._held[name] = tuple(block.block_id for block in blocks)

    def release(self, name: str) -> None:
        """Ignores unknown names."""
        held = self._held.pop(name, ())
        if held and self._pool is not None:
            # A request's last block is evicted first, as vLLM does it.
            self._pool.free_blocks(self._pool.blocks[one] for one in reversed(held))
