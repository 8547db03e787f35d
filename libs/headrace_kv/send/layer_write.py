"""The writes that carry layer ranges, and their record by link. Used by the sender's thread only."""

from __future__ import annotations

import time
from array import array
from dataclasses import replace

import numpy as np

from headrace.engine.v1.link_pb2 import SentLink
from headrace_common.errors import InternalError, ProtocolViolation
from headrace_common.latency.clocks import clocks_now
from headrace_common.telemetry.layer_stamps import NEVER, WORDS_PER_WRITE, WRITES_MAX, pack_writes
from headrace_kv.copy_plan import BlockSpan, Int64Array, Runs
from headrace_kv.layout import STATE, KvLayout
from headrace_kv.messages import LayerRange, Reservation, first_sent_tokens
from headrace_kv.shard_map import Edge, edges_from
from headrace_kv.transport.base import KvTransport, WriteResult, find_host


class LayerWrite:
    """One layer range on its way to one decode rank, written in batches of `runs`.

    `next_batch`, of `next_bytes`, is the next batch to start. It is None once every batch was started. By
    time.monotonic_ns, the range was ready at `ready_ns`, its first batch was started at `submitted_ns`, and its last
    one has landed at `landed_ns`; 0 before. Of the time until `submitted_ns`, `window_wait_ns` were a full window.
    `entry_count`, `gather_ns` and `staging_wait_ns` are the sums of `results`.
    """

    def __init__(
        self,
        layer_range: LayerRange,
        edge: Edge,
        span: BlockSpan,
        session: str,
        runs: Runs,
        transport: KvTransport,
    ) -> None:
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
        self.window_wait_ns = self._window_before_ns = 0
        self.results: list[WriteResult] = []
        self.entry_count = self.gather_ns = self.staging_wait_ns = 0

    @property
    def landed(self) -> bool:
        """Whether every batch has landed."""
        return self.next_batch is None and not self._batches_in_flight

    def count_window_waits_from(self, total_ns: int) -> None:
        """The total of the peer's WindowWait was `total_ns` when the range was pushed."""
        self._window_before_ns = total_ns

    def count_window_waits_to(self, total_ns: int) -> None:
        """The total of the peer's WindowWait is `total_ns` when the first batch is started."""
        self.window_wait_ns = total_ns - self._window_before_ns

    def start_batch(self) -> Runs:
        """Removes and returns the next batch, which is in flight from now on."""
        batch = self.next_batch
        if batch is None:
            raise InternalError(f"layer {self.layer} has no batch left")
        if not self.submitted_ns:
            self.submitted_ns = time.monotonic_ns()
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

    def _advance(self) -> None:
        batch = next(self._batches, None)
        self.next_batch = batch
        if batch is not None:
            self.next_bytes = self.payload_bytes if batch is self.runs else batch.payload_bytes


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


_WORD_MAX = NEVER - 1
_WORDS_MAX = 2 * WRITES_MAX * WORDS_PER_WRITE


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
        self._entry_count += write.entry_count
        for result in write.results:
            self._transports[result.transport] = None
            self._strategies[result.strategy] = None
        landed_ns = write.landed_ns or now_ns
        submitted_ns = write.submitted_ns or landed_ns
        gathered_ns = submitted_ns
        staging_us = gather_us = 0
        if write.gather_ns or write.staging_wait_ns:
            gathered_ns = min(landed_ns, submitted_ns + write.staging_wait_ns + write.gather_ns)
            staging_ns = min(write.staging_wait_ns, gathered_ns - submitted_ns)
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
