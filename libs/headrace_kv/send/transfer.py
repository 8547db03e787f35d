"""One transfer as one prefill rank sees it. Plain state of the sender's thread."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from headrace_common.errors import InternalError, ProtocolViolation, TransferTimeout
from headrace_kv.handoff.logits import LOGITS_RANK
from headrace_kv.handoff.messages import (
    LayerRange,
    LayerSent,
    Reservation,
    SendReport,
    TransferTarget,
)
from headrace_kv.layout.layout import STATE, CacheGroup, KvLayout
from headrace_kv.plan.copy_plan import BlockSpan, Int64Array
from headrace_kv.plan.shard_map import Edge, edges_from
from headrace_kv.send.layer_write import LayerWrite, PieceCopy


class OutgoingTransfer:
    """What is known, waiting, under way, sent and still to be sent of one transfer.

    `writing` are the copies that are not acknowledged yet, in order; `pending_count` the batches that a transport has.
    Nothing of a stopped transfer is written after `quiet_s` of the monotonic clock, once no batch is pending. While it
    is `opened` without a reservation, decode is asked for that again at `ask_again_s`. `logits` wait to be sent;
    `owes_logits` until they are, where this rank sends them.
    """

    def __init__(self, target: TransferTarget, deadline_s: float) -> None:
        self.target = target
        self.deadline_s = deadline_s
        self.pieces: deque[LayerRange] = deque()
        self.sent: list[LayerSent] = []
        self.finished = False
        self.queued = False
        self.opened = False
        self.ask_again_s = 0.0
        self.stopped = False
        self.reason = ""
        self.detail = ""
        self.quiet_s = 0.0
        self.writing: deque[LayerWrite] = deque()
        self.pending_count = 0
        self.payload_bytes = 0
        self.control_bytes = 0
        self.reservation: Reservation | None = None
        self.logits: bytes | None = None
        self.owes_logits = False
        self._layout: KvLayout | None = None
        self._decode_layout: KvLayout | None = None
        self._destination_blocks: tuple[Int64Array, ...] = ()
        self._edges: tuple[tuple[Edge, ...], ...] | None = None
        self._taken: dict[tuple[int, int], int] = {}
        self._landed: dict[tuple[int, int], int] = {}
        self._open_edges = 0
        self._spans: dict[int, tuple[tuple[int, ...], BlockSpan]] = {}

    @property
    def transfer_id(self) -> str:
        return self.target.transfer_id

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
        """Whether all that this rank must send has landed."""
        return self.reservation is not None and self._open_edges == 0 and not self.owes_logits

    @property
    def idle(self) -> bool:
        """Whether the plan has nothing for this rank."""
        return self.edge_count == 0 and not self.owes_logits

    def plan(self, rank: int, layout: KvLayout, decode_layout: KvLayout) -> None:
        """Finds the rank's edges. Raises LayoutMismatch when there are no ranks to hold the heads."""
        self._layout, self._decode_layout = layout, decode_layout
        self.owes_logits = self.target.with_logits and rank == LOGITS_RANK
        self._edges = tuple(
            edges_from(rank, layout, decode_layout, layer, self.transfer_id)
            for layer in range(layout.layer_count)
        )

    def reserve(self, reservation: Reservation) -> None:
        """Takes decode's blocks. Raises ProtocolViolation when they do not hold the tokens."""
        if self._decode_layout is None:
            raise InternalError(f"{self.transfer_id} has no plan yet")
        start, end = reservation.start_token, reservation.end_token
        fault = reservation.find_fault(self._decode_layout)
        if fault:
            raise ProtocolViolation(f"the reservation of {self.transfer_id} {fault}")
        self.reservation = reservation
        self._destination_blocks = tuple(
            np.asarray(block_ids, dtype=np.int64) for block_ids in reservation.block_ids_by_group
        )
        self._taken = {
            (layer, edge.destination_rank): start
            for layer, edges in enumerate(self._edges or ())
            for edge in edges
        }
        self._landed = dict(self._taken)
        self._open_edges = len(self._landed) if end > start else 0

    def copies(self, piece: LayerRange) -> list[PieceCopy]:
        """What of a piece is still to be copied, clamped to the reservation. A token is given out once.

        Raises InternalError when the engine skipped tokens, cut a block, gave too few blocks or an unfinished state.
        """
        if self.reservation is None or self._edges is None:
            raise InternalError(f"{self.transfer_id} has no reservation yet")
        if not 0 <= piece.layer < len(self._edges):
            raise InternalError(f"{self.transfer_id}: the engine pushed layer {piece.layer}")
        if self.group_of(piece.layer).kind == STATE:
            piece = self._whole_state(piece)
        low = max(piece.start_token, self.reservation.start_token)
        end = min(piece.end_token, self.reservation.end_token)
        found = []
        for edge in self._edges[piece.layer]:
            taken = self._taken[piece.layer, edge.destination_rank]
            start = max(low, taken)
            if start >= end:
                continue
            if start > taken:
                raise InternalError(
                    f"{self.transfer_id}: the engine skipped tokens [{taken}, {start}) of layer {piece.layer}"
                )
            found.append(PieceCopy(edge, self._span(piece, start, end)))
            self._taken[piece.layer, edge.destination_rank] = end
        return found

    def landed(self, copy: PieceCopy, sent: LayerSent) -> None:
        """Notes a copy that the transport has acknowledged, in the order of `copies`."""
        self._landed[sent.layer, copy.edge.destination_rank] = copy.end_token
        self.payload_bytes += sent.payload_bytes
        self.sent.append(sent)
        if self.reservation is not None and copy.end_token == self.reservation.end_token:
            self._open_edges -= 1

    def missing(self) -> str:
        """What is not whole, e.g. "layers 3, 7, 8 (3 of 30)", or else "the logits"."""
        if self._edges is None or self.reservation is None:
            return "every layer"
        end = self.reservation.end_token
        missing = sorted({layer for (layer, _), landed in self._landed.items() if landed < end})
        if not missing and self.owes_logits:
            return "the logits"
        named = ", ".join(str(layer) for layer in missing[:16])
        more = ", ..." if len(missing) > 16 else ""
        return f"layers {named}{more} ({len(missing)} of {len(self._edges)})"

    def too_late(self) -> TransferTimeout:
        """The error of a deadline that has passed."""
        if not self.planned:
            waited_for = f"the handshake with {self.target.decode}"
        elif self.reservation is None:
            waited_for = f"the reservation of {self.target.decode}"
        else:
            waited_for = self.missing()
        return TransferTimeout(
            f"the deadline of {self.transfer_id} passed while waiting for {waited_for}",
            metadata={"transfer_id": self.transfer_id, "waited_for": waited_for},
        )

    def report(self, rank: int) -> SendReport:
        """What the rank did."""
        return SendReport(
            self.transfer_id, rank, self.reason, self.detail, tuple(self.sent), self.control_bytes
        )

    def group_of(self, layer: int) -> CacheGroup:
        """The cache group of a layer. Raises InternalError before the plan."""
        if self._layout is None:
            raise InternalError(f"{self.transfer_id} has no plan yet")
        return self._layout.group_of(layer)

    def _whole_state(self, piece: LayerRange) -> LayerRange:
        """A state stands for all tokens. Raises InternalError for one that is not final."""
        assert self.reservation is not None
        if piece.end_token < self.reservation.end_token:
            raise InternalError(
                f"{self.transfer_id}: the engine pushed the state of layer {piece.layer} at token {piece.end_token}"
            )
        return replace(piece, start_token=0)

    def _span(self, piece: LayerRange, start: int, end: int) -> BlockSpan:
        """The tokens and their blocks. The same object comes back for the same chunk's other layers of a group.

        Raises InternalError when the engine cut a block that must be whole, or gave too few.
        """
        assert self.reservation is not None
        assert self._layout is not None
        assert self._decode_layout is not None
        index = self._layout.group_index(piece.layer)
        block_ids, span = self._spans.get(index, ((), None))
        if span is not None and block_ids is piece.block_ids and span.has_tokens(start, end):
            return span
        group, decode_group = self._layout.groups[index], self._decode_layout.groups[index]
        size = group.block_tokens
        cut = start % size or (end % size and end != self.reservation.end_token) if size else 0
        if cut and not group.token_addressable:
            raise InternalError(
                f"{self.transfer_id}: tokens [{start}, {end}) of layer {piece.layer} cut a block of {size}"
            )
        first = start // size if size else 0
        last = first + group.blocks_between(start, end)
        if len(piece.block_ids) < last:
            raise InternalError(
                f"{self.transfer_id}: {len(piece.block_ids)} source blocks do not hold {end} tokens"
            )
        reserved = self.reservation.start_token
        span = BlockSpan(
            start_token=start,
            end_token=end,
            source_blocks=np.asarray(piece.block_ids[first:last], dtype=np.int64),
            source_first_token=first * size,
            destination_blocks=self._destination_blocks[index],
            destination_first_token=reserved - reserved % max(1, decode_group.block_tokens),
        )
        self._spans[index] = (piece.block_ids, span)
        return span
