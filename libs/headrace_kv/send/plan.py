"""Which tokens of each layer a prefill rank writes, and where they go. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace_common.errors import InternalError, ProtocolViolation
from headrace_kv.copy_plan import BlockSpan
from headrace_kv.layout import STATE, KvLayout
from headrace_kv.messages import LayerRange, Reservation, first_sent_tokens
from headrace_kv.shard_map import Edge, Edges

_LAYERS_NAMED_MAX = 16


class WritePlan:
    """Which tokens of each layer one rank writes to which decode ranks, and which of them have landed.

    Raises ProtocolViolation when decode's blocks do not hold the tokens.
    """

    def __init__(
        self, edges: Edges, layout: KvLayout, decode_layout: KvLayout, reservation: Reservation
    ) -> None:
        """`edges` are those that leave the rank."""
        self._transfer_id = reservation.transfer_id
        fault = reservation.find_fault(decode_layout)
        if fault:
            raise ProtocolViolation(f"the reservation of {self._transfer_id} {fault}")
        self._layout = layout
        self._decode_layout = decode_layout
        self._reservation = reservation
        self._edges = edges
        starts = self._starts = first_sent_tokens(decode_layout, reservation)
        self._destination_blocks = tuple(
            np.asarray(block_ids, dtype=np.int64) for block_ids in reservation.block_ids_by_group
        )
        # Both by (layer, decode rank): one past the last token that was claimed, and that has landed.
        self._claimed = {
            (layer, edge.destination_rank): starts[layer]
            for layer, leaving in enumerate(edges)
            for edge in leaving
        }
        self._landed = dict(self._claimed)
        end = reservation.end_token
        self._open_edge_count = sum(start < end for start in self._landed.values())
        self._spans: dict[int, tuple[tuple[int, ...], BlockSpan]] = {}

    @property
    def complete(self) -> bool:
        """Whether every reserved token has landed."""
        return self._open_edge_count == 0

    def claim(self, layer_range: LayerRange) -> list[tuple[Edge, BlockSpan]]:
        """The parts of a range that are still to be written, clamped to the reservation. Claims a token once.

        Raises InternalError when the engine skipped tokens, cut a block, gave too few blocks or an unfinished state.
        """
        layer, reservation = layer_range.layer, self._reservation
        if not 0 <= layer < len(self._edges):
            raise InternalError(f"{self._transfer_id}: the engine pushed layer {layer}")
        if self._layout.group_of(layer).kind == STATE:
            layer_range = self._whole_state(layer_range)
        low = max(layer_range.start_token, self._starts[layer])
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
            parts.append((edge, self._span(layer_range, start, end)))
            self._claimed[key] = end
        return parts

    def landed(self, layer: int, destination_rank: int, end_token: int) -> None:
        """The next claimed tokens of a layer have landed at a decode rank, up to `end_token`."""
        self._landed[layer, destination_rank] = end_token
        self._open_edge_count -= end_token == self._reservation.end_token

    def missing(self) -> str:
        """What has not landed as a whole, e.g. "layers 3, 7, 8 (3 of 30)"; "" when everything has."""
        end = self._reservation.end_token
        layers = sorted({layer for (layer, _), landed in self._landed.items() if landed < end})
        if not layers:
            return ""
        named = ", ".join(str(layer) for layer in layers[:_LAYERS_NAMED_MAX])
        more = ", ..." if len(layers) > _LAYERS_NAMED_MAX else ""
        return f"layers {named}{more} ({len(layers)} of {len(self._edges)})"

    def _whole_state(self, layer_range: LayerRange) -> LayerRange:
        """A state stands for all tokens. Raises InternalError for one that is not final."""
        if layer_range.end_token < self._reservation.end_token:
            raise InternalError(
                f"{self._transfer_id}: the engine pushed the state of layer {layer_range.layer}"
                f" at token {layer_range.end_token}"
            )
        return replace(layer_range, start_token=0)

    def _span(self, layer_range: LayerRange, start: int, end: int) -> BlockSpan:
        """The tokens and their blocks. The other layers of the same chunk and cache group get the same object.

        Raises InternalError when the engine cut a block that must be whole, or gave too few.
        """
        index, reservation = self._layout.group_index(layer_range.layer), self._reservation
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
