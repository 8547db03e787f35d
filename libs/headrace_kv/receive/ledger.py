"""What has landed of one transfer. Pure state: completion is a property of the plan, never a number a peer sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from headrace_common.errors import InternalError, ProtocolViolation
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.compatibility import count_spans
from headrace_kv.layout.layout import STATE, KvLayout
from headrace_kv.plan.shard_map import Edge, Key, edges, local_edges


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """Tokens [start_token, end_token) of one layer, landed on one decode rank, that another one needs too."""

    edge: Edge
    layer: int
    start_token: int
    end_token: int
    payload_bytes: int

    @property
    def key(self) -> Key:
        """What the ledger counts it by."""
        return (self.edge.source_rank, self.edge.destination_rank, self.layer)

    def __str__(self) -> str:
        edge = self.edge
        ranks = f"decode rank {edge.source_rank} to rank {edge.destination_rank}"
        return f"layer {self.layer} from {ranks}"


class Ledger:
    """Counts the effective (source rank, destination rank, layer) keys of one transfer into `layout`'s worker.

    Network keys land by their acknowledgements. Local keys, by which decode ranks pass on what they were sent, are
    taken when due and land once copied. Raises LayoutMismatch when there are no ranks to hold the heads.
    """

    def __init__(self, layout: KvLayout, prefill: KvLayout, reservation: Reservation) -> None:
        self._layout = layout
        self._reservation = reservation
        self._edges: dict[Key, Edge] = {
            (edge.source_rank, edge.destination_rank, layer): edge
            for layer in range(layout.layer_count)
            for edge in edges(prefill, layout, layer, reservation.transfer_id)
        }
        self._covered = dict.fromkeys(self._edges, reservation.start_token)
        empty = reservation.start_token >= reservation.end_token
        self._missing: set[Key] = set() if empty else set(self._edges)
        self._bytes_by_source: dict[int, int] = {}
        self._local_edges: dict[tuple[int, int], list[Edge]] = {}
        for layer in range(layout.layer_count):
            for edge in local_edges(layout, layer, reservation.transfer_id):
                self._local_edges.setdefault((edge.source_rank, layer), []).append(edge)
        self._local_covered: dict[Key, int] = {
            (leader, edge.destination_rank, layer): reservation.start_token
            for (leader, layer), found in self._local_edges.items()
            for edge in found
        }
        self._local_taken = dict(self._local_covered)
        self._local_missing: set[Key] = set() if empty else set(self._local_covered)
        self._due: dict[tuple[int, int], int] = {}
        self._unchecked: set[tuple[Key, int]] = set()
        self.local_bytes = 0
        self.ack_count = 0
        self.duplicate_count = 0

    @property
    def complete(self) -> bool:
        """Whether every expected key, network and local, is covered to the end, and checked where it must be."""
        return not self._missing and not self._local_missing and not self._unchecked

    @property
    def landed(self) -> bool:
        """Whether every network key is covered to the end."""
        return not self._missing

    @property
    def payload_bytes(self) -> int:
        """Bytes that have landed over the network, duplicates not counted."""
        return sum(self._bytes_by_source.values())

    @property
    def expected_keys(self) -> frozenset[Key]:
        """The network's part of the plan."""
        return frozenset(self._edges)

    @property
    def local_keys(self) -> frozenset[Key]:
        """The local part of the plan, as (leading decode rank, decode rank, layer)."""
        return frozenset(self._local_covered)

    @property
    def source_ranks(self) -> frozenset[int]:
        """Prefill ranks that take part."""
        return frozenset(source for source, _, _ in self._edges)

    def arrived_layers(self, destination_rank: int) -> int:
        """How many layers, counted from the first one, are whole on one decode rank, and checked where they must be."""
        unchecked = (key for key, _ in self._unchecked)
        return min(
            (
                layer
                for _, rank, layer in chain(self._missing, self._local_missing, unchecked)
                if rank == destination_rank
            ),
            default=self._layout.layer_count,
        )

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
        """Counts tokens [start_token, end_token) of a network key; False for a duplicate, which changes nothing.

        Raises ProtocolViolation for a key outside the plan, tokens outside the reservation, a gap, or bytes that
        cannot be those tokens'.
        """
        edge = self._edges.get(key)
        if edge is None:
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
        expected_bytes = group.bytes_between(start_token, end_token, edge.head_count)
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
        leader = key[1:]
        if leader in self._local_edges:
            # Only ranks of one head have copies, and one head has one source.
            self._due[leader] = end_token
        return True

    def edge(self, key: Key) -> Edge:
        """The heads that a network key stands for. Raises KeyError for one outside the plan."""
        return self._edges[key]

    def await_check(self, key: Key, end_token: int) -> None:
        """What has landed of a key up to `end_token` counts only once it is checked."""
        self._unchecked.add((key, end_token))

    def note_checked(self, key: Key, end_token: int) -> None:
        """It is what was sent."""
        self._unchecked.discard((key, end_token))

    def take_local(self, byte_limit: int) -> tuple[LocalCopy, ...]:
        """Copies that are due, of about `byte_limit` bytes or one of any size. None of them is handed out again."""
        found: list[LocalCopy] = []
        taken_bytes = 0
        while self._due and taken_bytes < byte_limit:
            leader, layer = oldest = next(iter(self._due))
            end_token = self._due.pop(oldest)
            group = self._layout.group_of(layer)
            for edge in self._local_edges[oldest]:
                key = (leader, edge.destination_rank, layer)
                start_token, self._local_taken[key] = self._local_taken[key], end_token
                nbytes = group.bytes_between(start_token, end_token, edge.head_count)
                found.append(LocalCopy(edge, layer, start_token, end_token, nbytes))
                taken_bytes += nbytes
        return tuple(found)

    def land_local(self, copy: LocalCopy) -> None:
        """Counts a copy that was taken and has been made, in order. Raises InternalError for any other."""
        covered, taken = self._local_covered.get(copy.key), self._local_taken.get(copy.key, 0)
        if covered != copy.start_token or not covered < copy.end_token <= taken:
            raise InternalError(
                f"transfer {self._reservation.transfer_id}: tokens [{copy.start_token}, {copy.end_token}) "
                f"of {copy} were not due"
            )
        self._local_covered[copy.key] = copy.end_token
        self.local_bytes += copy.payload_bytes
        if copy.end_token == self._reservation.end_token:
            self._local_missing.discard(copy.key)

    def missing(self) -> str:
        """The keys still missing, in few words: "layers 17-29 from rank 2; layer 3 from rank 0 to rank 1".

        A local key, "layer 3 from decode rank 0 to rank 1", is named once what it copies has landed.
        """
        network = self._missing_network()
        waiting = {key[1:] for key in self._missing}
        locals_: dict[tuple[int, int], list[int]] = {}
        for leader, member, layer in self._local_missing:
            if (leader, layer) not in waiting:
                locals_.setdefault((leader, member), []).append(layer)
        named = (
            f"{_count(layers, 'layer')} from decode rank {leader} to rank {member}"
            for (leader, member), layers in sorted(locals_.items())
        )
        checks = sorted({layer for (_, _, layer), _ in self._unchecked})
        unchecked = (f"the check of {_count(checks, 'layer')}",) if checks else ()
        return "; ".join((*network, *named, *unchecked))

    def _missing_network(self) -> list[str]:
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
        return [
            f"{_count(layers, 'layer')} from rank {source}"
            + (f" to {_count(named, 'rank')}" if named else "")
            for (source, named), layers in sorted(groups.items())
        ]

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
