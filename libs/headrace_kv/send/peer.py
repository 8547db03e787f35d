"""What a sender stores about one decode worker. Used by the sender's thread only."""

from __future__ import annotations

import time
from typing import Protocol

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import InternalError
from headrace_kv.copy_plan import BlockSpan, CopyPlanner
from headrace_kv.hidden_state import hidden_state_rank
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory
from headrace_kv.messages import LayerRange
from headrace_kv.send.context import SenderContext
from headrace_kv.send.layer_write import LayerWrite
from headrace_kv.send.stream import HandoffStream
from headrace_kv.shard_map import Edge


class WriteObserver(Protocol):
    """Is called for every write to a decode worker, and may add to its LayerDone. Runs on the sender's thread."""

    def on_all_started(self, transfer_id: str, write: LayerWrite, digest_seed: int) -> None:
        """The transport has every batch of a write. The source bytes stay as they are until the transfer is quiet.

        `digest_seed` is that of the transfer's digests.
        """

    def on_acknowledge(self, write: LayerWrite, message: handoff_pb2.LayerDone) -> None:
        """`message` is about to be sent for a write that has landed."""


class WindowWait:
    """For how long the writes to one decode worker could not go on because its window was full."""

    def __init__(self) -> None:
        self._ended_ns = 0
        self._since_ns = 0

    def start(self) -> None:
        """The next write has no room. Repeats are ignored."""
        if not self._since_ns:
            self._since_ns = time.monotonic_ns()

    def end(self) -> None:
        """The next write has room."""
        if self._since_ns:
            self._ended_ns = self.total_ns()
            self._since_ns = 0

    def total_ns(self) -> int:
        """Nanoseconds of all waits until now."""
        if not self._since_ns:
            return self._ended_ns
        return self._ended_ns + time.monotonic_ns() - self._since_ns


class SenderPeer:
    """One incarnation of a decode worker: its stream, and once that is ready its memory and its observers."""

    def __init__(self, context: SenderContext, stream: HandoffStream) -> None:
        self.stream = stream
        self.window_wait = WindowWait()
        self._context = context
        self._descriptor: KvDescriptor | None = None
        self._observers: tuple[WriteObserver, ...] = ()
        # By decode rank, and whether the source is main memory.
        self._planners: dict[tuple[int, bool], CopyPlanner] = {}

    @property
    def sends_hidden_state(self) -> bool:
        """Whether this rank sends the hidden states of its worker's transfers."""
        return self._context.rank == hidden_state_rank(self._context.layout)

    def stream_ready(
        self, descriptor: KvDescriptor, observers: tuple[WriteObserver, ...] = ()
    ) -> None:
        """The handshake is complete."""
        self._descriptor = descriptor
        self._observers = observers

    @property
    def layout(self) -> KvLayout | None:
        """The worker's KV layout; None before the stream is ready."""
        return self._descriptor.layout if self._descriptor is not None else None

    @property
    def observers(self) -> tuple[WriteObserver, ...]:
        """The observers that the worker asked for."""
        return self._observers

    def plan_write(self, layer_range: LayerRange, edge: Edge, span: BlockSpan) -> LayerWrite:
        """Plans the write of an edge's share of a range. Raises LayoutMismatch when the two memories do not pair up."""
        key = edge.destination_rank, layer_range.in_host_memory
        memory = self._memory(edge.destination_rank)
        planner = self._planners.get(key)
        if planner is None:
            source = self._source_memory(in_host_memory=layer_range.in_host_memory)
            planner = self._planners[key] = CopyPlanner(source, memory)
        runs = planner.plan(edge, layer_range.layer, span)
        return LayerWrite(layer_range, edge, span, memory.session, runs, self._context.transport)

    def _source_memory(self, *, in_host_memory: bool) -> RankMemory:
        """This rank's memory. Raises InternalError for main memory without blocks."""
        memory = self._context.host_memory if in_host_memory else self._context.memory
        if memory is None:
            raise InternalError("this rank has no blocks in main memory")
        return memory

    def _memory(self, destination_rank: int) -> RankMemory:
        """A decode rank's memory. Raises InternalError when the descriptor has no such rank."""
        ranks = self._descriptor.ranks if self._descriptor is not None else ()
        if destination_rank >= len(ranks):
            raise InternalError(f"{self.stream.decode} describes no rank {destination_rank}")
        return ranks[destination_rank]
