"""The scheduler's half of beginning early: requests that may run before the last layers of their KV are there.

vLLM takes such a request for loaded. So until its transfer is whole, its blocks must not be given to others when it
ends (I1), must not stay in the prefix cache then, and are not shared with requests that come meanwhile. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace_engine.vllm.step.plan import LateLoad, StepPlan


@dataclass(slots=True)
class _Begun:
    """`runs` once it has been in a step; `lost` when its transfer has failed, and `told` once vLLM has heard that;
    `over` when the request has ended.
    """

    request_id: str
    block_ids: tuple[int, ...]
    deadline_unix_s: float
    runs: bool = False
    lost: bool = False
    told: bool = False
    over: bool = False


class OverlappedRequests:
    """`evict(block_ids)` takes blocks out of the prefix cache."""

    def __init__(self) -> None:
        self.evict: Callable[[set[int]], None] = lambda block_ids: None
        self._begun: dict[str, _Begun] = {}

    def __bool__(self) -> bool:
        """Whether anything is awaited."""
        return bool(self._begun)

    @property
    def unsure(self) -> bool:
        """Whether the prefix cache may hold blocks that are not whole."""
        return any(not one.over for one in self._begun.values())

    def begin(
        self,
        transfer_id: str,
        request_id: str,
        block_ids: tuple[int, ...],
        deadline_unix_s: float,
    ) -> None:
        """vLLM is told that the request has its KV."""
        self._begun[transfer_id] = _Begun(request_id, block_ids, deadline_unix_s)

    def settle(self, plan: StepPlan, transfer_id: str, whole: bool) -> None:
        """Nothing writes for a transfer any more. One that was not begun here is left alone."""
        one = self._begun.get(transfer_id)
        if one is None:
            return
        if one.over:
            plan.finished_sends[one.request_id] = transfer_id
        elif not whole:
            # Its next step says so to vLLM.
            one.lost = True
            return
        del self._begun[transfer_id]

    def finished(self, request_id: str) -> bool:
        """The request is over; True when its blocks must stay until its transfer has settled."""
        for transfer_id, one in self._begun.items():
            if one.request_id == request_id:
                self.evict(set(one.block_ids))
                one.over = True
                if one.lost:
                    del self._begun[transfer_id]
                return not one.lost
        return False

    def withheld(self, received: Iterable[str]) -> set[str]:
        """Of the requests that vLLM is about to take for received, those that ended during the very step that said so.

        For these vLLM would free the blocks; they stay until their transfer has settled, as for `finished`.
        """
        over = {one.request_id for one in self._begun.values() if one.over}
        return over.intersection(received)

    def plan(self, plan: StepPlan, scheduled_request_ids: Iterable[str]) -> None:
        """Tells the ranks whom the step may have to wait for."""
        if not self._begun:
            return
        scheduled = set(scheduled_request_ids)
        for transfer_id, one in list(self._begun.items()):
            one.runs = one.runs or one.request_id in scheduled
            if one.told and not one.over:
                # vLLM computes it here instead, and nobody else writes to its blocks any more.
                del self._begun[transfer_id]
            elif one.runs and not one.over:
                plan.late.append(
                    LateLoad(transfer_id, one.block_ids, one.deadline_unix_s, one.lost)
                )
                one.told = one.lost
