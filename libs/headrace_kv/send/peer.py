"""A decode worker as one prefill rank's sender sees it. Plain state of the sender's thread."""

from __future__ import annotations

from collections import deque

from headrace_common.errors import InternalError
from headrace_kv.layout.layout import KvDescriptor, RankMemory
from headrace_kv.plan.copy_plan import CopyPlanner
from headrace_kv.send.layer_write import LayerWrite
from headrace_kv.send.stream import HandoffLink
from headrace_kv.send.transfer import OutgoingTransfer


class SenderPeer:
    """One incarnation of a decode worker: what is cached about it, and what waits to be written to it.

    `ready` holds transfers with pieces, each once; `backlog` the copies of the piece that was taken last.
    """

    def __init__(self, link: HandoffLink) -> None:
        self.link = link
        self.descriptor: KvDescriptor | None = None
        self.transfers: dict[str, OutgoingTransfer] = {}
        self.ready: deque[OutgoingTransfer] = deque()
        self.backlog: deque[tuple[OutgoingTransfer, LayerWrite]] = deque()
        self.in_turn = False
        self._planners: dict[int, CopyPlanner] = {}

    def planner(self, memory: RankMemory, destination_rank: int) -> CopyPlanner:
        """Plans copies from `memory` into a decode rank's. Raises LayoutMismatch when the two do not pair up."""
        planner = self._planners.get(destination_rank)
        if planner is None:
            planner = CopyPlanner(memory, self.memory(destination_rank))
            self._planners[destination_rank] = planner
        return planner

    def memory(self, destination_rank: int) -> RankMemory:
        """A decode rank's memory. Raises InternalError when the descriptor has no such rank."""
        ranks = self.descriptor.ranks if self.descriptor is not None else ()
        if destination_rank >= len(ranks):
            raise InternalError(f"{self.link.decode} describes no rank {destination_rank}")
        return ranks[destination_rank]

    def next_write(self) -> tuple[OutgoingTransfer, LayerWrite] | None:
        """The copy whose next batch is to be written, if a piece has been taken; stopped transfers are dropped."""
        while self.backlog:
            transfer, write = self.backlog[0]
            if not transfer.stopped and write.next_batch is not None:
                return transfer, write
            self.backlog.popleft()
        return None

    def next_ready(self) -> OutgoingTransfer | None:
        """Takes the next transfer that has a piece; stopped ones are dropped."""
        while self.ready:
            transfer = self.ready.popleft()
            transfer.queued = False
            if not transfer.stopped and transfer.pieces:
                return transfer
        return None
