"""The writes of one prefill rank: whose turn it is, what fits into a window, one write and its digest.

Used by the sender's thread only.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import InternalError, ProtocolViolation
from headrace_kv.checksum import is_digested, source_digest
from headrace_kv.copy_plan import BlockSpan, CopyPlanner, Int64Array, Runs
from headrace_kv.layout import STATE, KvDescriptor, KvLayout
from headrace_kv.messages import LayerRange, Reservation, first_sent_tokens
from headrace_kv.send.stream import HandoffStream, SenderContext
from headrace_kv.shard_map import Edge, edges_from
from headrace_kv.transport.base import KvTransport, WriteResult
from headrace_kv.transport.memory import Memory


class WritePlan:
    """Which tokens of each layer one rank writes to which decode ranks, and which of them have landed.

    Raises LayoutMismatch when decode's layout has no ranks to hold the heads.
    """

    def __init__(
        self, transfer_id: str, rank: int, layout: KvLayout, decode_layout: KvLayout
    ) -> None:
        self._transfer_id = transfer_id
        self._layout = layout
        self._decode_layout = decode_layout
        self._edges = tuple(
            edges_from(rank, layout, decode_layout, layer, transfer_id)
            for layer in range(layout.layer_count)
        )
        self._reservation: Reservation | None = None
        self._starts: tuple[int, ...] = ()
        self._destination_blocks: tuple[Int64Array, ...] = ()
        # Both by (layer, decode rank): one past the last token that was claimed, and that has landed.
        self._claimed: dict[tuple[int, int], int] = {}
        self._landed: dict[tuple[int, int], int] = {}
        self._open_edge_count = 0
        self._spans: dict[int, tuple[tuple[int, ...], BlockSpan]] = {}

    @property
    def layer_count(self) -> int:
        """Layers of the model."""
        return len(self._edges)

    @property
    def edge_count(self) -> int:
        """(layer, decode rank) pairs that this rank writes."""
        return sum(len(edges) for edges in self._edges)

    @property
    def complete(self) -> bool:
        """Whether every reserved token has landed."""
        return self._reservation is not None and self._open_edge_count == 0

    def reserve(self, reservation: Reservation) -> None:
        """Sets decode's blocks. Raises ProtocolViolation when they do not hold the tokens."""
        fault = reservation.find_fault(self._decode_layout)
        if fault:
            raise ProtocolViolation(f"the reservation of {self._transfer_id} {fault}")
        end = reservation.end_token
        starts = self._starts = first_sent_tokens(self._decode_layout, reservation)
        self._reservation = reservation
        self._destination_blocks = tuple(
            np.asarray(block_ids, dtype=np.int64) for block_ids in reservation.block_ids_by_group
        )
        self._claimed = {
            (layer, edge.destination_rank): starts[self._layout.group_index(layer)]
            for layer, edges in enumerate(self._edges)
            for edge in edges
        }
        self._landed = dict(self._claimed)
        self._open_edge_count = sum(start < end for start in self._landed.values())

    def claim(self, layer_range: LayerRange) -> list[tuple[Edge, BlockSpan]]:
        """The parts of a range that are still to be written, clamped to the reservation. Claims a token once.

        Raises InternalError when the engine skipped tokens, cut a block, gave too few blocks or an unfinished state.
        """
        reservation = self._reservation
        if reservation is None:
            raise InternalError(f"{self._transfer_id} has no reservation yet")
        layer = layer_range.layer
        if not 0 <= layer < len(self._edges):
            raise InternalError(f"{self._transfer_id}: the engine pushed layer {layer}")
        if self._layout.group_of(layer).kind == STATE:
            layer_range = self._whole_state(layer_range, reservation)
        low = max(layer_range.start_token, self._starts[self._layout.group_index(layer)])
        end = min(layer_range.end_token, reservation.end_token)
        parts = []
        for edge in self._edges[layer]:
            key = layer, edge.destination_rank
            claimed = self._claimed[key]
            start = max(low, claimed)
            if start >= end:
                continue
            if start > claimed:
                raise InternalError(
                    f"{self._transfer_id}: the engine skipped tokens [{claimed}, {start}) of layer {layer}"
                )
            parts.append((edge, self._span(layer_range, reservation, start, end)))
            self._claimed[key] = end
        return parts

    def landed(self, layer: int, destination_rank: int, end_token: int) -> None:
        """The next claimed tokens of a layer have landed at a decode rank, up to `end_token`."""
        self._landed[layer, destination_rank] = end_token
        if self._reservation is not None and end_token == self._reservation.end_token:
            self._open_edge_count -= 1

    def missing_layers(self) -> tuple[int, ...]:
        """The layers that have not landed as a whole; none without a reservation."""
        if self._reservation is None:
            return ()
        end = self._reservation.end_token
        return tuple(sorted({layer for (layer, _), landed in self._landed.items() if landed < end}))

    def _whole_state(self, layer_range: LayerRange, reservation: Reservation) -> LayerRange:
        """A state stands for all tokens. Raises InternalError for one that is not final."""
        if layer_range.end_token < reservation.end_token:
            raise InternalError(
                f"{self._transfer_id}: the engine pushed the state of layer {layer_range.layer}"
                f" at token {layer_range.end_token}"
            )
        return replace(layer_range, start_token=0)

    def _span(
        self, layer_range: LayerRange, reservation: Reservation, start: int, end: int
    ) -> BlockSpan:
        """The tokens and their blocks. The other layers of the same chunk and cache group get the same object.

        Raises InternalError when the engine cut a block that must be whole, or gave too few.
        """
        index = self._layout.group_index(layer_range.layer)
        block_ids, span = self._spans.get(index, ((), None))
        if span is not None and block_ids is layer_range.block_ids and span.has_tokens(start, end):
            return span
        group, decode_group = self._layout.groups[index], self._decode_layout.groups[index]
        size = group.block_tokens
        cut = start % size or (end % size and end != reservation.end_token) if size else 0
        if cut and not group.token_addressable:
            raise InternalError(
                f"{self._transfer_id}: tokens [{start}, {end}) of layer {layer_range.layer} cut a block of {size}"
            )
        first = start // size if size else 0
        last = first + group.blocks_between(start, end)
        if len(layer_range.block_ids) < last:
            raise InternalError(
                f"{self._transfer_id}: {len(layer_range.block_ids)} source blocks do not hold {end} tokens"
            )
        reserved = reservation.start_token
        span = BlockSpan(
            start_token=start,
            end_token=end,
            source_blocks=np.asarray(layer_range.block_ids[first:last], dtype=np.int64),
            source_first_token=first * size,
            destination_blocks=self._destination_blocks[index],
            destination_first_token=reserved - reserved % max(1, decode_group.block_tokens),
        )
        self._spans[index] = (layer_range.block_ids, span)
        return span


class LayerWrite:
    """One layer range on its way to one decode rank, written in batches of `runs`.

    `next_batch`, of `next_bytes`, is the next batch to start. It is None once every batch was started, or the write was
    abandoned. By time.monotonic_ns, the range was ready at `ready_ns`, its first batch was started at `submitted_ns`,
    and its last one has landed at `landed_ns`; 0 before. Of the time until `submitted_ns`, `window_wait_ns` were a full
    window. `entry_count`, `gather_ns` and `staging_wait_ns` are the sums of `results`.
    """

    def __init__(
        self,
        layer_range: LayerRange,
        edge: Edge,
        span: BlockSpan,
        session: str,
        runs: Runs,
        transport: KvTransport,
        window_before_ns: int = 0,
    ) -> None:
        """`window_before_ns` is the total of the peer's window waits when the range was pushed."""
        self.transfer_id = layer_range.transfer_id
        self.layer = layer_range.layer
        self.destination_rank = edge.destination_rank
        self.start_token = span.start_token
        self.end_token = span.end_token
        self.session = session
        self.runs = runs
        self.payload_bytes = runs.payload_bytes
        self.next_batch: Runs | None = None
        self.next_bytes = 0
        self._batches = runs.batches(transport.entry_limit, transport.byte_limit)
        self._advance()
        self._batches_in_flight = 0
        self.ready_ns = layer_range.ready_ns
        self.submitted_ns = self.landed_ns = 0
        self.window_wait_ns = 0
        self._window_before_ns = window_before_ns
        self.results: list[WriteResult] = []
        self.entry_count = self.gather_ns = self.staging_wait_ns = 0
        self._digest: int | None = None

    @property
    def landed(self) -> bool:
        """Whether every batch has landed."""
        return self.next_batch is None and not self._batches_in_flight

    def start_batch(self, window_wait_ns: int = 0) -> Runs:
        """Removes and returns the next batch, which is in flight from now on.

        `window_wait_ns` is the total of the peer's window waits.
        """
        batch = self.next_batch
        if batch is None:
            raise InternalError(f"layer {self.layer} has no batch left")
        if not self.submitted_ns:
            self.submitted_ns = time.monotonic_ns()
            self.window_wait_ns = window_wait_ns - self._window_before_ns
        self._advance()
        self._batches_in_flight += 1
        return batch

    def batch_landed(self, result: WriteResult, end_ns: int) -> None:
        """A batch has landed, at `end_ns` of time.monotonic_ns."""
        self._batches_in_flight -= 1
        self.results.append(result)
        self.entry_count += result.entry_count
        self.gather_ns += result.gather_ns
        self.staging_wait_ns += result.staging_wait_ns
        self.landed_ns = max(self.landed_ns, end_ns)

    def abandon(self) -> None:
        """Starts no further batch."""
        self.next_batch = None

    def digest_source(self, memory: Memory, share: float, seed: int) -> None:
        """Computes the digest if decode wants one of this layer, see is_digested.

        The transport has every batch, and may still send: the source stays as it is until the transfer is quiet.
        """
        if is_digested(share, self.transfer_id, self.layer):
            self._digest = source_digest(memory, self.runs, seed)

    def layer_done(self) -> handoff_pb2.LayerDone:
        """The acknowledgement of the whole write."""
        return handoff_pb2.LayerDone(
            transfer_id=self.transfer_id,
            layer=self.layer,
            destination_rank=self.destination_rank,
            start_token=self.start_token,
            end_token=self.end_token,
            payload_bytes=self.payload_bytes,
            digest=self._digest,
        )

    def _advance(self) -> None:
        batch = next(self._batches, None)
        self.next_batch = batch
        if batch is not None:
            self.next_bytes = self.payload_bytes if batch is self.runs else batch.payload_bytes


class SenderPeer:
    """One incarnation of a decode worker: its stream, the writes that wait, and once the stream is ready its memory.

    `_ready` has the transfers with ranges to plan, each once, and `_backlog` the writes of the range that was planned
    last.
    """

    def __init__(self, context: SenderContext, stream: HandoffStream) -> None:
        self.stream = stream
        self.digest_share = 0.0
        """The part of all (transfer, layer) pairs that the worker wants digests of."""
        self._context = context
        self._descriptor: KvDescriptor | None = None
        # By decode rank, and whether the source is main memory.
        self._planners: dict[tuple[int, bool], CopyPlanner] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._backlog: deque[LayerWrite] = deque()
        self._window_waited_ns = 0
        self._window_full_ns = 0

    @property
    def layout(self) -> KvLayout | None:
        """The worker's KV layout; None before the stream is ready."""
        return self._descriptor.layout if self._descriptor is not None else None

    def stream_ready(self, descriptor: KvDescriptor, digest_share: float) -> None:
        """The handshake is complete."""
        self._descriptor = descriptor
        self.digest_share = digest_share

    def add(self, transfer_id: str) -> None:
        """The transfer has ranges to plan. It keeps its place when it waits already."""
        self._ready[transfer_id] = None

    def next_write(self, plan: Callable[[str], Iterable[LayerWrite]]) -> LayerWrite | None:
        """The first write with a batch left. When there is none, plans a range of the next transfer."""
        while True:
            while self._backlog:
                if self._backlog[0].next_batch is not None:
                    return self._backlog[0]
                self._backlog.popleft()
            if not self._ready:
                return None
            transfer_id, _ = self._ready.popitem(last=False)
            self._backlog.extend(plan(transfer_id))

    def plan_write(
        self, layer_range: LayerRange, edge: Edge, span: BlockSpan, window_before_ns: int
    ) -> LayerWrite:
        """Plans the write of an edge's share of a range. Raises LayoutMismatch when the two memories do not pair up."""
        context, key = self._context, (edge.destination_rank, layer_range.in_host_memory)
        ranks = self._descriptor.ranks if self._descriptor is not None else ()
        if edge.destination_rank >= len(ranks):
            raise InternalError(f"{self.stream.decode} describes no rank {edge.destination_rank}")
        memory = ranks[edge.destination_rank]
        planner = self._planners.get(key)
        if planner is None:
            source = context.host_memory if layer_range.in_host_memory else context.memory
            if source is None:
                raise InternalError("this rank has no blocks in main memory")
            planner = self._planners[key] = CopyPlanner(source, memory)
        runs = planner.plan(edge, layer_range.layer, span)
        return LayerWrite(
            layer_range, edge, span, memory.session, runs, context.transport, window_before_ns
        )

    def window_checked(self, *, has_room: bool) -> None:
        """The next write has room in the window, or waits for it."""
        if not has_room:
            self._window_full_ns = self._window_full_ns or time.monotonic_ns()
        elif self._window_full_ns:
            self._window_waited_ns = self.window_wait_ns()
            self._window_full_ns = 0

    def window_wait_ns(self) -> int:
        """For how long the writes to this worker could not go on because its window was full, until now."""
        if not self._window_full_ns:
            return self._window_waited_ns
        return self._window_waited_ns + time.monotonic_ns() - self._window_full_ns


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch of a write that the transport has, to end by `end_s` of the monotonic clock."""

    write: LayerWrite
    nbytes: int
    future: Future[WriteResult]
    end_s: float


class Writes:
    """Decode workers with waiting writes take turns, and the transport gets what fits into the window of each.

    A worker without room delays no other. The window of a session holds at most `pending_limit` batches, and no more
    bytes than one write may have: those land well within a write lease. `plan` makes the writes of a transfer's next
    range. It is called when a worker has no other write left.
    """

    def __init__(self, transport: KvTransport, plan: Callable[[str], Iterable[LayerWrite]]) -> None:
        self._transport = transport
        self._plan = plan
        self._turns: OrderedDict[SenderPeer, None] = OrderedDict()
        self._stalled = False
        self._in_flight: set[Batch] = set()
        self._sessions: dict[str, tuple[int, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether the last `next_write` found nothing to start, and nothing was added since."""
        return self._stalled or not self._turns

    def add(self, peer: SenderPeer, transfer_id: str) -> None:
        """The transfer has ranges to plan."""
        peer.add(transfer_id)
        self._give_turn(peer)

    def remove(self, peer: SenderPeer) -> None:
        """The stream to a decode worker is lost."""
        self._turns.pop(peer, None)

    def next_write(self) -> LayerWrite | None:
        """A write to start the next batch of; None when every worker waits for a batch to end."""
        for _ in range(len(self._turns)):
            peer, _ = self._turns.popitem(last=False)
            write = peer.next_write(self._plan)
            if write is None:
                continue
            self._give_turn(peer)
            count, nbytes = self._sessions.get(write.session, (0, 0))
            has_room = not count or (
                count < self._transport.pending_limit
                and nbytes + write.next_bytes <= self._transport.byte_limit
            )
            peer.window_checked(has_room=has_room)
            if has_room:
                return write
        self._stalled = True
        return None

    def start(self, write: LayerWrite, peer: SenderPeer, now_s: float, timeout_s: float) -> Batch:
        """Starts the write's next batch. Every failure is in its future. Call `end` when that is done."""
        nbytes = write.next_bytes
        runs = write.start_batch(peer.window_wait_ns())
        count, before = self._sessions.get(write.session, (0, 0))
        self._sessions[write.session] = (count + 1, before + nbytes)
        late_writes = peer.stream.late_writes
        late_writes.write_started()
        try:
            future = self._transport.submit(write.session, runs, timeout_s)
        except Exception as error:  # noqa: BLE001 - a result like any other
            future = Future()
            future.set_exception(error)
        # On the transport's thread: this one may be waiting in the transport for another peer.
        future.add_done_callback(lambda _: late_writes.write_ended())
        batch = Batch(write, nbytes, future, now_s + timeout_s)
        self._in_flight.add(batch)
        return batch

    def end(self, batch: Batch) -> None:
        """Frees the room of a batch that has ended."""
        self._in_flight.remove(batch)
        session = batch.write.session
        count, before = self._sessions[session]
        if count == 1:
            del self._sessions[session]
        else:
            self._sessions[session] = (count - 1, before - batch.nbytes)

    def overdue(self, now_s: float, grace_s: float) -> bool:
        """Whether batches are in flight, and all should have ended more than `grace_s` ago."""
        ends_s = max((batch.end_s for batch in self._in_flight), default=now_s)
        return now_s > ends_s + grace_s

    def _give_turn(self, peer: SenderPeer) -> None:
        self._turns[peer] = None
        self._stalled = False
