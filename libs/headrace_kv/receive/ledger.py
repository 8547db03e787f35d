"""Counts what has landed of one transfer. Pure state.

Completion is a property of the plan. It never depends on a number that a peer sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass

from headrace_common.errors import InternalError, ProtocolViolation
from headrace_kv.compatibility import count_spans
from headrace_kv.layout import STATE, KvLayout
from headrace_kv.messages import Reservation, first_sent_tokens
from headrace_kv.shard_map import Edge, Key, edges, local_edges


@dataclass(frozen=True, slots=True)
class LayerLanded:
    """Tokens [start_token, end_token) of one key. `digest` is what the sender computed, None where it sent none."""

    edge: Edge
    layer: int
    start_token: int
    end_token: int
    digest: int | None

    @property
    def key(self) -> Key:
        """The ledger's key."""
        return (self.edge.source_rank, self.edge.destination_rank, self.layer)

    def __str__(self) -> str:
        edge = self.edge
        return f"layer {self.layer} from rank {edge.source_rank} to rank {edge.destination_rank}"


class Ledger:
    """Counts the (source rank, destination rank, layer) keys that cross the network into `layout`'s worker.

    A key lands by its acknowledgements. Raises LayoutMismatch when there are no ranks to hold the heads.
    """

    def __init__(self, layout: KvLayout, prefill: KvLayout, reservation: Reservation) -> None:
        self._layout = layout
        self._reservation = reservation
        self._edges: dict[Key, Edge] = {
            (edge.source_rank, edge.destination_rank, layer): edge
            for layer, found in enumerate(edges(prefill, layout, reservation.transfer_id))
            for edge in found
        }
        starts = first_sent_tokens(layout, reservation)
        self._covered = {key: starts[key[2]] for key in self._edges}
        self._missing = {
            key for key, start in self._covered.items() if start < reservation.end_token
        }
        self._bytes_by_source: dict[int, int] = defaultdict(int)
        self.ack_count = 0

    @property
    def whole_layers(self) -> int:
        """How many of the first layers have all of their keys covered to the end. Reads all missing keys."""
        return min((layer for _, _, layer in self._missing), default=self._layout.layer_count)

    @property
    def complete(self) -> bool:
        """Whether every expected key is covered to the end."""
        return not self._missing

    @property
    def missing_keys(self) -> Set[Key]:
        """Keys that are not covered to the end. Changes as they land."""
        return self._missing

    @property
    def payload_bytes(self) -> int:
        """Bytes that have landed over the network, duplicates not counted."""
        return sum(self._bytes_by_source.values())

    def bytes_from(self, source_rank: int) -> int:
        """Bytes that one prefill rank has landed."""
        return self._bytes_by_source[source_rank]

    def source_complete(self, source_rank: int) -> bool:
        """Whether everything expected of one prefill rank has landed. True for one that has no part."""
        return all(source != source_rank for source, _, _ in self._missing)

    def land(self, key: Key, start_token: int, end_token: int, payload_bytes: int) -> bool:
        """Counts tokens [start_token, end_token) of a network key; False for a duplicate, which changes nothing.

        Raises ProtocolViolation for a key outside the plan, tokens outside the reservation, a gap, or bytes that
        cannot be those tokens'.
        """
        edge = self._edges.get(key)
        if edge is None:
            raise self._violation(key, "is not part of the plan")
        group = self._layout.group_of(key[2])
        end = self._reservation.end_token
        first = group.first_sent_token(self._reservation.start_token, end)
        if not first <= start_token < end_token <= end:
            raise self._violation(
                key,
                f"has tokens [{start_token}, {end_token}) outside the reserved [{first}, {end})",
            )
        if group.kind == STATE and end_token != self._reservation.end_token:
            raise self._violation(key, f"is a state of token {end_token}, not of the last")
        covered = self._covered[key]
        if end_token <= covered:
            return False
        if start_token > covered:
            raise self._violation(key, f"skips tokens [{covered}, {start_token})")
        expected_bytes = group.bytes_between(start_token, end_token, edge.head_count)
        if payload_bytes != expected_bytes:
            raise self._violation(
                key,
                f"has {payload_bytes} bytes for tokens [{start_token}, {end_token}) "
                f"instead of {expected_bytes}",
            )
        self._covered[key] = end_token
        self._bytes_by_source[key[0]] += payload_bytes
        self.ack_count += 1
        if end_token == self._reservation.end_token:
            self._missing.discard(key)
        return True

    def edge(self, key: Key) -> Edge:
        """The heads that a network key stands for. Raises KeyError for one outside the plan."""
        return self._edges[key]

    def missing(self) -> str:
        """The missing keys in short: "layers 17-29 from rank 2; layer 3 from rank 0 to rank 1"."""
        decode_ranks: dict[tuple[int, int], list[int]] = {}
        for source, destination, layer in self._missing:
            decode_ranks.setdefault((source, layer), []).append(destination)
        planned: dict[tuple[int, int], int] = {}
        for source, _, layer in self._edges:
            planned[source, layer] = planned.get((source, layer), 0) + 1
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for (source, layer), destinations in decode_ranks.items():
            partly = len(destinations) < planned[source, layer]
            named = tuple(sorted(destinations)) if partly else ()
            groups.setdefault((source, named), []).append(layer)
        return "; ".join(
            f"{name_numbers('layer', layers)} from rank {source}"
            + (f" to {name_numbers('rank', named)}" if named else "")
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


def name_numbers(noun: str, numbers: Iterable[int]) -> str:
    """ "layers 3, 17-29" for {3, 17, 18, ..., 29}."""
    held = tuple(numbers)
    return f"{noun}{'s' if len(held) > 1 else ''} {count_spans(held)}"


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """Tokens [start_token, end_token) of one layer, to be copied from one decode rank to another."""

    edge: Edge
    layer: int
    start_token: int
    end_token: int
    payload_bytes: int

    @property
    def key(self) -> Key:
        """The local ledger's key."""
        return (self.edge.source_rank, self.edge.destination_rank, self.layer)

    def __str__(self) -> str:
        edge = self.edge
        ranks = f"decode rank {edge.source_rank} to rank {edge.destination_rank}"
        return f"layer {self.layer} from {ranks}"


class LocalLedger:
    """Counts (leading decode rank, decode rank, layer) keys of one transfer into `layout`'s worker.

    A copy is due once its range has landed on the leader. `take_due` returns each copy once, and `count` counts it
    when it has been made.
    """

    def __init__(self, layout: KvLayout, reservation: Reservation) -> None:
        self._layout = layout
        self.reservation = reservation
        self._edges: dict[tuple[int, int], list[Edge]] = {}
        for layer, found in enumerate(local_edges(layout, reservation.transfer_id)):
            for edge in found:
                self._edges.setdefault((edge.source_rank, layer), []).append(edge)
        starts = first_sent_tokens(layout, reservation)
        self._copied_to: dict[Key, int] = {
            (leader, edge.destination_rank, layer): starts[layer]
            for (leader, layer), found in self._edges.items()
            for edge in found
        }
        self._taken_to = dict(self._copied_to)
        self._landed_to: dict[tuple[int, int], int] = {}
        self._missing = {
            key for key, start in self._copied_to.items() if start < reservation.end_token
        }
        self._due: dict[tuple[int, int], int] = {}
        self.copied_bytes = 0

    @property
    def missing_keys(self) -> Set[Key]:
        """Keys that are not copied to the end. Changes as copies are counted."""
        return self._missing

    def land(self, landed: LayerLanded) -> None:
        """Makes copies of a range due where its destination is a leader."""
        leader = (landed.edge.destination_rank, landed.layer)
        if leader in self._edges:
            # Only ranks that hold one head have copies, and one head has one source: ranges come in order.
            self._landed_to[leader] = self._due[leader] = landed.end_token

    def take_due(self, byte_limit: int) -> tuple[LocalCopy, ...]:
        """Due copies of about `byte_limit` bytes, or one of any size. No copy is returned twice."""
        found: list[LocalCopy] = []
        found_bytes = 0
        while self._due and found_bytes < byte_limit:
            leader, layer = oldest = next(iter(self._due))
            end_token = self._due.pop(oldest)
            group = self._layout.group_of(layer)
            for edge in self._edges[oldest]:
                key = (leader, edge.destination_rank, layer)
                start_token, self._taken_to[key] = self._taken_to[key], end_token
                nbytes = group.bytes_between(start_token, end_token, edge.head_count)
                found.append(LocalCopy(edge, layer, start_token, end_token, nbytes))
                found_bytes += nbytes
        return tuple(found)

    def count(self, copy: LocalCopy) -> None:
        """Counts a copy that has been made. Raises InternalError for one that was not due, or is out of order."""
        copied, taken = self._copied_to.get(copy.key), self._taken_to.get(copy.key, 0)
        if copied != copy.start_token or not copied < copy.end_token <= taken:
            raise InternalError(
                f"transfer {self.reservation.transfer_id}: tokens [{copy.start_token}, {copy.end_token}) "
                f"of {copy} were not due"
            )
        self._copied_to[copy.key] = copy.end_token
        self.copied_bytes += copy.payload_bytes
        if copy.end_token == self.reservation.end_token:
            self._missing.discard(copy.key)

    def missing(self) -> str:
        """The missing keys of which every token has landed on the leader: "layer 3 from decode rank 0 to rank 1"."""
        groups: dict[tuple[int, int], list[int]] = {}
        for leader, rank, layer in self._missing:
            if self._landed_to.get((leader, layer)) == self.reservation.end_token:
                groups.setdefault((leader, rank), []).append(layer)
        return "; ".join(
            f"{name_numbers('layer', layers)} from decode rank {leader} to rank {rank}"
            for (leader, rank), layers in sorted(groups.items())
        )
