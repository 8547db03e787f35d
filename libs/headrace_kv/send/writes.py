"""The writes of one prefill rank: turns of decode workers, windows, one write with its digest, and their record.

Used by the sender's thread only.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final, NamedTuple

from headrace.engine.v1.link_pb2 import SentLink
from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import InternalError, TransferFailed
from headrace_common.latency.clocks import clocks_now
from headrace_common.telemetry.layer_stamps import NEVER, WORDS_PER_WRITE, WRITES_MAX, pack_writes
from headrace_kv.checksum import DigestTerms, is_digested, source_digest
from headrace_kv.copy_plan import BlockSpan, CopyPlanner, Runs
from headrace_kv.layout import KvDescriptor, KvLayout
from headrace_kv.messages import LayerRange
from headrace_kv.send.stream import HandoffStream, SenderContext
from headrace_kv.shard_map import Edge
from headrace_kv.transport.base import KvTransport, WriteResult, find_host
from headrace_kv.transport.memory import Memory

_WORD_MAX = NEVER - 1
_WORDS_MAX = 2 * WRITES_MAX * WORDS_PER_WRITE


class LayerWrite:
    """One layer range on its way to one decode rank, written in batches of `runs`.

    `next_batch`, of `next_bytes`, is the next batch to start. It is None once every batch was started, or the write was
    abandoned. By time.monotonic_ns, the range was ready at `ready_ns`, its first batch was started at `submitted_ns`,
    and its last one has landed at `landed_ns`; 0 before. Of the time until `submitted_ns`, `window_wait_ns` were a full
    window.
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
        self._digest: int | None = None
        self._digest_field = "digest"

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
        self.landed_ns = max(self.landed_ns, end_ns)

    def abandon(self) -> None:
        """Starts no further batch."""
        self.next_batch = None

    def digest_source(self, memory: Memory, terms: DigestTerms, seed: int) -> None:
        """Computes the digest if decode wants one of this layer, see is_digested.

        The transport has every batch, and may still send: the source stays as it is until the transfer is quiet.
        """
        if terms.share > 0.0 and is_digested(terms.share, self.transfer_id, self.layer):
            self._digest = source_digest(memory, self.runs, seed, word_sum=terms.word_sums)
            self._digest_field = "word_sum" if terms.word_sums else "digest"

    def layer_done(self) -> handoff_pb2.LayerDone:
        """The acknowledgement of the whole write."""
        return handoff_pb2.LayerDone(
            transfer_id=self.transfer_id,
            layer=self.layer,
            destination_rank=self.destination_rank,
            start_token=self.start_token,
            end_token=self.end_token,
            payload_bytes=self.payload_bytes,
            **{self._digest_field: self._digest},
        )

    def _advance(self) -> None:
        batch = next(self._batches, None)
        self.next_batch = batch
        if batch is not None:
            self.next_bytes = self.payload_bytes if batch is self.runs else batch.payload_bytes


class LinkRecord:
    """What a rank wrote to one decode rank for one transfer. Keeps the times of the last writes in one array.

    Add the writes in the order in which they were planned.
    """

    def __init__(self, first: LayerWrite) -> None:
        self._destination_rank = first.destination_rank
        self._session = first.session
        self._start_ns = first.ready_ns
        self._words = array("I")
        # Dictionaries keep the order in which the names were added.
        self._transports: dict[str, None] = {}
        self._strategies: dict[str, None] = {}
        self._payload_bytes = self._run_count = self._entry_count = self._write_count = 0
        self._submitted_ns = 0
        self._ready_ns = self._landed_ns = self._end_ns = self._start_ns
        self._moving_ns = 0

    def add_landed(self, write: LayerWrite, reserved_ns: int, now_ns: int) -> None:
        """A write has landed and is acknowledged now. The transfer had its reservation at `reserved_ns`."""
        self._payload_bytes += write.payload_bytes
        self._run_count += len(write.runs)
        gather_ns = staging_wait_ns = 0
        for result in write.results:
            self._entry_count += result.entry_count
            gather_ns += result.gather_ns
            staging_wait_ns += result.staging_wait_ns
            self._transports[result.transport] = None
            self._strategies[result.strategy] = None
        landed_ns = write.landed_ns or now_ns
        submitted_ns = write.submitted_ns or landed_ns
        gathered_ns = submitted_ns
        staging_us = gather_us = 0
        if gather_ns or staging_wait_ns:
            gathered_ns = min(landed_ns, submitted_ns + staging_wait_ns + gather_ns)
            staging_ns = min(staging_wait_ns, gathered_ns - submitted_ns)
            staging_us = staging_ns // 1000
            gather_us = (gathered_ns - submitted_ns - staging_ns) // 1000
        idle_ns = max(gathered_ns, self._landed_ns)
        if landed_ns > idle_ns:
            self._moving_ns += landed_ns - idle_ns
        self._landed_ns = max(self._landed_ns, landed_ns)
        self._end_ns = max(self._end_ns, now_ns)
        move_us = (landed_ns - gathered_ns) // 1000
        times_us = (staging_us, gather_us, move_us, (now_ns - landed_ns) // 1000)
        self._add(write, reserved_ns, submitted_ns, times_us)

    def add_unfinished(self, write: LayerWrite, reserved_ns: int, now_ns: int) -> None:
        """The transfer ends now, and the write has not landed as a whole."""
        submitted_ns = write.submitted_ns or now_ns
        waited_us = max(0, now_ns - submitted_ns) // 1000
        self._add(write, reserved_ns, submitted_ns, (0, 0, NEVER, waited_us))
        self._end_ns = max(self._end_ns, now_ns)

    def report(self) -> SentLink:
        """Describes the link."""
        now = clocks_now()
        start_unix_ns = now.unix_ns - (now.monotonic_ns - self._start_ns)
        return SentLink(
            destination_rank=self._destination_rank,
            destination_host=find_host(self._session),
            transport="+".join(self._transports),
            strategy="+".join(self._strategies),
            payload_bytes=self._payload_bytes,
            run_count=self._run_count,
            entry_count=self._entry_count,
            write_count=self._write_count,
            start_unix_ns=start_unix_ns,
            submitted_unix_ns=start_unix_ns + self._submitted_ns - self._start_ns,
            ready_unix_ns=start_unix_ns + self._ready_ns - self._start_ns,
            landed_unix_ns=start_unix_ns + self._landed_ns - self._start_ns,
            end_unix_ns=start_unix_ns + self._end_ns - self._start_ns,
            moving_ns=self._moving_ns,
            layers=pack_writes(self._words),
        )

    def _add(
        self,
        write: LayerWrite,
        reserved_ns: int,
        submitted_ns: int,
        times_us: tuple[int, int, int, int],
    ) -> None:
        """`times_us` are the last four words."""
        ready_ns = write.ready_ns
        self._write_count += 1
        self._ready_ns = max(self._ready_ns, ready_ns)
        self._submitted_ns = self._submitted_ns or submitted_ns
        wait_ns = max(0, submitted_ns - ready_ns)
        lease_ns = window_ns = 0
        if reserved_ns > ready_ns:
            lease_ns = min(reserved_ns - ready_ns, wait_ns)
        if write.window_wait_ns:
            window_ns = min(write.window_wait_ns, wait_ns - lease_ns)
        words = self._words
        if len(words) >= _WORDS_MAX:
            del words[: _WORDS_MAX // 2]
        row = (
            write.layer,
            write.start_token,
            write.end_token,
            write.payload_bytes,
            (ready_ns - self._start_ns) // 1000,
            lease_ns // 1000,
            window_ns // 1000,
            wait_ns // 1000,
            *times_us,
        )
        try:
            words.extend(row)
        except OverflowError:
            # `extend` keeps the words before the one that is too large or negative.
            del words[len(words) - len(words) % WORDS_PER_WRITE :]
            words.extend([NEVER if word == NEVER else max(0, min(word, _WORD_MAX)) for word in row])


# Decode may answer after its engine's running step.
ANSWER_WAIT_MAX_S: Final = 8.0
ANSWER_WAIT_MIN_S: Final = 1.0
_PROBE_INTERVAL_S: Final = 60.0


class SenderPeer:
    """One incarnation of a decode worker: its stream, the writes that wait, and once the stream is ready its memory.

    `_ready` has the transfers with ranges to plan, each once, and `_backlog` the writes of the range that was planned
    last.
    """

    def __init__(self, context: SenderContext, stream: HandoffStream) -> None:
        self.stream = stream
        self.digests = DigestTerms(0.0)
        """What the worker wants."""
        self._context = context
        self._descriptor: KvDescriptor | None = None
        # By decode rank, and whether the source is main memory.
        self._planners: dict[tuple[int, bool], CopyPlanner] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._backlog: deque[LayerWrite] = deque()
        self._window_waited_ns = 0
        self._window_full_ns = 0
        self._answer_wait_s = ANSWER_WAIT_MAX_S
        # The transfer that last had the longest wait after a silent Open, and since when.
        self._probe, self._probe_s = "", 0.0

    @property
    def layout(self) -> KvLayout | None:
        """The worker's KV layout; None before the stream is ready."""
        return self._descriptor.layout if self._descriptor is not None else None

    def answer_wait_s(self, transfer_id: str, now_s: float) -> float:
        """How long the worker may leave the Open of a transfer without an answer.

        After a silent one it has a second, and twice as long after each answer. One transfer a minute has the longest
        wait still, because the worker may only be slow.
        """
        if self._answer_wait_s < ANSWER_WAIT_MAX_S and now_s >= self._probe_s + _PROBE_INTERVAL_S:
            self._probe, self._probe_s = transfer_id, now_s
        return ANSWER_WAIT_MAX_S if transfer_id == self._probe else self._answer_wait_s

    def open_answered(self) -> None:
        """The worker has answered an Open in time."""
        self._answer_wait_s = min(ANSWER_WAIT_MAX_S, 2 * self._answer_wait_s)

    def open_silent(self, now_s: float) -> None:
        """The worker has left an Open without an answer for too long."""
        if self._answer_wait_s >= ANSWER_WAIT_MAX_S:
            self._probe, self._probe_s = "", now_s
        self._answer_wait_s = ANSWER_WAIT_MIN_S

    def stream_ready(self, descriptor: KvDescriptor, digests: DigestTerms) -> None:
        """The handshake is complete."""
        self._descriptor = descriptor
        self.digests = digests

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


class WriteBatch(NamedTuple):
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

    def __init__(self, context: SenderContext, plan: Callable[[str], Iterable[LayerWrite]]) -> None:
        self._transport = context.transport
        self._clock = context.clock
        self._plan = plan
        self._turns: OrderedDict[SenderPeer, None] = OrderedDict()
        self._in_flight: set[WriteBatch] = set()
        self._sessions: dict[str, tuple[int, int]] = {}

    def add(self, peer: SenderPeer, transfer_id: str) -> None:
        """The transfer has ranges to plan."""
        peer.add(transfer_id)
        self._turns[peer] = None

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
            self._turns[peer] = None
            count, nbytes = self._sessions.get(write.session, (0, 0))
            has_room = not count or (
                count < self._transport.pending_limit
                and nbytes + write.next_bytes <= self._transport.byte_limit
            )
            peer.window_checked(has_room=has_room)
            if has_room:
                return write
        return None

    def start(self, write: LayerWrite, peer: SenderPeer, left_s: float) -> WriteBatch:
        """Starts the write's next batch, which has `left_s` and no longer than the lease. Call `end` when that is done.

        Every failure of the transport is in its future. Raises TransferFailed without a lease.
        """
        lease_s = peer.stream.lease.remaining_s(self._clock.lease_s())
        if lease_s <= 0.0:
            raise TransferFailed(f"the write lease from {peer.stream.decode} is over")
        timeout_s = min(lease_s, left_s)
        end_s = self._clock.monotonic_s() + timeout_s
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
        batch = WriteBatch(write, nbytes, future, end_s)
        self._in_flight.add(batch)
        return batch

    def end(self, batch: WriteBatch) -> None:
        """Frees the room of a batch that has ended."""
        self._in_flight.remove(batch)
        session = batch.write.session
        count, before = self._sessions[session]
        if count == 1:
            del self._sessions[session]
        else:
            self._sessions[session] = (count - 1, before - batch.nbytes)

    def overdue(self, grace_s: float) -> bool:
        """Whether batches are in flight, and all should have ended more than `grace_s` ago."""
        now_s = self._clock.monotonic_s()
        return now_s > max((batch.end_s for batch in self._in_flight), default=now_s) + grace_s
