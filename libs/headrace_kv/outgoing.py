"""One transfer as one prefill rank sees it. Plain state of the sender's thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from headrace_common.errors import InternalError, ProtocolViolation
from headrace_kv.block_map import Int64Array
from headrace_kv.layout import KvLayout
from headrace_kv.shard_map import Edge, edges_from
from headrace_kv.transfer import LayerPiece, LayerSent, Reservation, SendReport, TransferTarget


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """What one edge of a piece needs: tokens [start_token, end_token) and the blocks that hold them, paired."""

    edge: Edge
    start_token: int
    end_token: int
    source_blocks: Int64Array
    destination_blocks: Int64Array


class Outgoing:
    """What is known, waiting, sent and still to be sent of one transfer."""

    def __init__(self, target: TransferTarget, deadline_s: float) -> None:
        self.target = target
        self.deadline_s = deadline_s
        self.pieces: deque[LayerPiece] = deque()
        self.sent: list[LayerSent] = []
        self.finished = False
        self.queued = False
        self.opened = False
        self.write_failed = False
        self.reason = ""
        self.detail = ""
        self.quiet_s: float | None = None
        self.reservation: Reservation | None = None
        self._block_tokens = 1
        self._destination_blocks: Int64Array = np.empty(0, dtype=np.int64)
        self._edges: tuple[tuple[Edge, ...], ...] | None = None
        self._covered: dict[tuple[int, int], int] = {}
        self._open_edges = 0
        self._sliced: tuple[tuple[int, ...], int, int] = ((), 0, 0)
        self._slices = (self._destination_blocks, self._destination_blocks)

    @property
    def transfer_id(self) -> str:
        return self.target.transfer_id

    @property
    def stopped(self) -> bool:
        """Whether the transfer has failed or was ended."""
        return self.quiet_s is not None

    @property
    def planned(self) -> bool:
        """Whether the edges are known."""
        return self._edges is not None

    @property
    def edge_count(self) -> int:
        """(layer, decode rank) pairs that this rank writes."""
        return sum(len(layer) for layer in self._edges or ())

    @property
    def complete(self) -> bool:
        """Whether all that this rank must send is sent."""
        return self.reservation is not None and self._open_edges == 0

    @property
    def payload_bytes(self) -> int:
        """Bytes sent."""
        return sum(sent.payload_bytes for sent in self.sent)

    def plan(self, rank: int, layout: KvLayout, decode_layout: KvLayout) -> None:
        """Finds the rank's edges. Raises LayoutMismatch when the heads do not divide."""
        self._block_tokens = layout.block_tokens
        self._edges = tuple(
            edges_from(
                rank,
                layout.tensor_parallel_size,
                decode_layout.tensor_parallel_size,
                layout.kv_head_count,
                layer,
                self.transfer_id,
            )
            for layer in range(layout.layer_count)
        )

    def reserve(self, reservation: Reservation) -> None:
        """Takes decode's blocks. Raises ProtocolViolation when they do not hold the tokens."""
        start, end = reservation.start_token, reservation.end_token
        needed = -(-end // self._block_tokens) - start // self._block_tokens
        if start % self._block_tokens or end < start or len(reservation.block_ids) < needed:
            raise ProtocolViolation(
                f"the reservation of {self.transfer_id} has {len(reservation.block_ids)} blocks "
                f"for tokens [{start}, {end})"
            )
        self.reservation = reservation
        self._destination_blocks = np.asarray(reservation.block_ids, dtype=np.int64)
        self._covered = {
            (layer, edge.destination_rank): start
            for layer, edges in enumerate(self._edges or ())
            for edge in edges
        }
        self._open_edges = len(self._covered) if end > start else 0

    def copies(self, piece: LayerPiece) -> list[PieceCopy]:
        """What of a piece is still to be copied, clamped to the reservation.

        Raises InternalError when the engine skipped tokens, cut a block or gave too few blocks.
        """
        if self.reservation is None or self._edges is None:
            raise InternalError(f"{self.transfer_id} has no reservation yet")
        if not 0 <= piece.layer < len(self._edges):
            raise InternalError(f"{self.transfer_id}: the engine pushed layer {piece.layer}")
        low = max(piece.start_token, self.reservation.start_token)
        end = min(piece.end_token, self.reservation.end_token)
        found = []
        for edge in self._edges[piece.layer]:
            covered = self._covered[piece.layer, edge.destination_rank]
            start = max(low, covered)
            if start >= end:
                continue
            if start > covered:
                raise InternalError(
                    f"{self.transfer_id}: the engine skipped tokens [{covered}, {start}) of layer {piece.layer}"
                )
            found.append(self._copy(edge, piece, start, end))
        return found

    def landed(self, copy: PieceCopy, sent: LayerSent) -> None:
        """Notes a copy that the transport has acknowledged."""
        self._covered[sent.layer, copy.edge.destination_rank] = copy.end_token
        self.sent.append(sent)
        if self.reservation is not None and copy.end_token == self.reservation.end_token:
            self._open_edges -= 1

    def missing_layers(self) -> str:
        """The layers that are not whole, e.g. "layers 3, 7, 8 (3 of 30)"."""
        if self._edges is None or self.reservation is None:
            return "every layer"
        end = self.reservation.end_token
        missing = sorted({layer for (layer, _), covered in self._covered.items() if covered < end})
        named = ", ".join(str(layer) for layer in missing[:16])
        more = ", ..." if len(missing) > 16 else ""
        return f"layers {named}{more} ({len(missing)} of {len(self._edges)})"

    def report(self, rank: int) -> SendReport:
        """What the rank did."""
        return SendReport(self.transfer_id, rank, self.reason, self.detail, tuple(self.sent))

    def _copy(self, edge: Edge, piece: LayerPiece, start: int, end: int) -> PieceCopy:
        assert self.reservation is not None
        size = self._block_tokens
        if start % size or (end % size and end != self.reservation.end_token):
            raise InternalError(
                f"{self.transfer_id}: tokens [{start}, {end}) of layer {piece.layer} cut a block of {size}"
            )
        first, last = start // size, -(-end // size)
        if len(piece.block_ids) < last:
            raise InternalError(
                f"{self.transfer_id}: {len(piece.block_ids)} source blocks do not hold {end} tokens"
            )
        source_blocks, destination_blocks = self._slice(piece.block_ids, first, last)
        return PieceCopy(edge, start, end, source_blocks, destination_blocks)

    def _slice(self, ids: tuple[int, ...], first: int, last: int) -> tuple[Int64Array, Int64Array]:
        """Blocks [first, last) of both sides. The same arrays come back for the same chunk's other layers."""
        assert self.reservation is not None
        if self._sliced[0] is not ids or self._sliced[1:] != (first, last):
            base = self.reservation.start_token // self._block_tokens
            self._sliced = (ids, first, last)
            self._slices = (
                np.asarray(ids[first:last], dtype=np.int64),
                self._destination_blocks[first - base : last - base],
            )
        return self._slices
