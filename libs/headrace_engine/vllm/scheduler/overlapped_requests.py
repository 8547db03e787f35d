"""Requests that run before the last layers of their KV have arrived, on the scheduler. Pure.

vLLM takes such a request for fully loaded. If it ends before its transfer has settled, its blocks must not be reused
(I1) and must leave the prefix cache. Until then, new requests must not share its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace_engine.vllm.step_plan import OverlappedLoad


@dataclass(slots=True)
class _Overlapped:
    """`started`: it was in a step. `finished`: the request has ended.

    `lost`: its transfer has failed. `loss_planned`: a step's plan has reported that to the ranks.
    """

    request_id: str
    block_ids: tuple[int, ...]
    deadline_s: float
    started: bool = False
    finished: bool = False
    lost: bool = False
    loss_planned: bool = False

    def mark_started(self) -> None:
        self.started = True

    def mark_finished(self) -> None:
        self.finished = True

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
        """The requests among `received` that ended during the step that reported them as received.

        vLLM would free their blocks. They stay until their transfer has settled, as in `request_finished`.
        """
        finished = {one.request_id for one in self._by_transfer.values() if one.finished}
        return finished.intersection(received)

    def plan_step(self, scheduled_request_ids: Iterable[str]) -> list[OverlappedLoad]:
        """The transfers that the step may have to wait for."""
        if not self._by_transfer:
            return []
        scheduled = set(scheduled_request_ids)
        loads: list[OverlappedLoad] = []
        for transfer_id, one in list(self._by_transfer.items()):
            if one.request_id in scheduled:
                one.mark_started()
            if one.loss_planned and not one.finished:
                # vLLM computes the request here instead, and no sender writes to its blocks any more.
                del self._by_transfer[transfer_id]
            elif one.started and not one.finished:
                loads.append(one.plan_load(transfer_id))
        return loads
