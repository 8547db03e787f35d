"""What has landed of one transfer. Pure state: completion is a property of the plan, never a number a peer sends."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_common.errors import ProtocolViolation
from headrace_kv.layout import STATE, KvLayout, count_spans
from headrace_kv.shard_map import Key, edges
from headrace_kv.transfer import Reservation


class Ledger:
    """Counts the effective (source rank, destination rank, layer) keys of one transfer into `layout`'s worker.

    Raises LayoutMismatch when there are no ranks to hold the heads.
    """

    def __init__(self, layout: KvLayout, prefill: KvLayout, reservation: Reservation) -> None:
        self._layout = layout
        self._reservation = reservation
        self._heads: dict[Key, int] = {
            (edge.source_rank, edge.destination_rank, layer): edge.head_count
            for layer in range(layout.layer_count)
            for edge in edges(prefill, layout, layer, reservation.transfer_id)
        }
        self._covered = dict.fromkeys(self._heads, reservation.start_token)
        empty = reservation.start_token >= reservation.end_token
        self._missing: set[Key] = set() if empty else set(self._heads)
        self._bytes_by_source: dict[int, int] = {}
        self.ack_count = 0
        self.duplicate_count = 0

    @property
    def complete(self) -> bool:
        """Whether every expected key is covered to the end."""
        return not self._missing

    @property
    def payload_bytes(self) -> int:
        """Bytes that have landed, duplicates not counted."""
        return sum(self._bytes_by_source.values())

    @property
    def expected_keys(self) -> frozenset[Key]:
        """The plan."""
        return frozenset(self._heads)

    @property
    def source_ranks(self) -> frozenset[int]:
        """Prefill ranks that take part."""
        return frozenset(source for source, _, _ in self._heads)

    def covered_to(self, key: Key) -> int:
        """One past the last token that has landed for a key."""
        return self._covered[key]

    def bytes_from(self, source_rank: int) -> int:
        """Bytes that one prefill rank has landed."""
        return self._bytes_by_source.get(source_rank, 0)

    def source_complete(self, source_rank: int) -> bool:
        """Whether everything expected of one prefill rank has landed."""
        return all(source != source_rank for source, _, _ in self._missing)

    def land(self, key: Key, start_token: int, end_token: int, payload_bytes: int) -> bool:
        """Counts tokens [start_token, end_token) of a key; False for a duplicate, which changes nothing.

        Raises ProtocolViolation for a key outside the plan, tokens outside the reservation, a gap, or bytes that
        cannot be those tokens'.
        """
        heads = self._heads.get(key)
        if heads is None:
            raise self._violation(key, "is not part of the plan")
        if (
            not self._reservation.start_token
            <= start_token
            < end_token
            <= self._reservation.end_token
        ):
            raise self._violation(
                key,
                f"has tokens [{start_token}, {end_token}) outside the reserved "
                f"[{self._reservation.start_token}, {self._reservation.end_token})",
            )
        group = self._layout.group_of(key[2])
        if group.kind == STATE and end_token != self._reservation.end_token:
            raise self._violation(key, f"is a state of token {end_token}, not of the last")
        covered = self._covered[key]
        if end_token <= covered:
            self.duplicate_count += 1
            return False
        if start_token > covered:
            raise self._violation(key, f"skips tokens [{covered}, {start_token})")
        expected_bytes = group.bytes_between(start_token, end_token, heads)
        if payload_bytes != expected_bytes:
            raise self._violation(
                key,
                f"has {payload_bytes} bytes for tokens [{start_token}, {end_token}) "
                f"instead of {expected_bytes}",
            )
        self._covered[key] = end_token
        source = key[0]
        self._bytes_by_source[source] = self._bytes_by_source.get(source, 0) + payload_bytes
        self.ack_count += 1
        if end_token == self._reservation.end_token:
            self._missing.discard(key)
        return True

    def missing(self) -> str:
        """The keys still missing, in few words: "layers 17-29 from rank 2; layer 3 from rank 0 to rank 1"."""
        decode_ranks: dict[tuple[int, int], list[int]] = {}
        for source, destination, layer in self._missing:
            decode_ranks.setdefault((source, layer), []).append(destination)
        planned: dict[tuple[int, int], int] = {}
        for source, _, layer in self._heads:
            planned[source, layer] = planned.get((source, layer), 0) + 1
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for (source, layer), destinations in decode_ranks.items():
            partly = len(destinations) < planned[source, layer]
            named = tuple(sorted(destinations)) if partly else ()
            groups.setdefault((source, named), []).append(layer)
        return "; ".join(
            f"{_count(layers, 'layer')} from rank {source}"
            + (f" to {_count(named, 'rank')}" if named else "")
            for (source, named), layers in sorted(groups.items())
        )

    def _violation(self, key: Key, what: str) -> ProtocolViolation:
        source, destination, layer = key
        transfer_id = self._reservation.transfer_id
        return ProtocolViolation(
            f"transfer {transfer_id}: layer {layer} from rank {source} to rank {destination} {what}",
            metadata={
                "transfer_id": transfer_id,
                "source_rank": str(source),
                "destination_rank": str(destination),
                "layer": str(layer),
            },
        )


def _count(numbers: Iterable[int], noun: str) -> str:
    """ "layers 3, 17-29" for {3, 17, 18, ..., 29}."""
    held = tuple(numbers)
    return f"{noun}{'s' if len(held) > 1 else ''} {count_spans(held)}"
