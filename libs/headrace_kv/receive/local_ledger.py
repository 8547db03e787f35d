"""Counts the copies between decode ranks of one host that a transfer needs. Pure state."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from headrace_common.errors import InternalError
from headrace_kv.handoff.messages import Reservation, first_sent_tokens
from headrace_kv.layout.layout import KvLayout
from headrace_kv.plan.shard_map import Edge, Key, local_edges
from headrace_kv.receive.ledger import LayerLanded, name_numbers


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
        self._reservation = reservation
        self._edges: dict[tuple[int, int], list[Edge]] = {}
        for layer in range(layout.layer_count):
            for edge in local_edges(layout, layer, reservation.transfer_id):
                self._edges.setdefault((edge.source_rank, layer), []).append(edge)
        starts = first_sent_tokens(layout, reservation)
        self._copied_to: dict[Key, int] = {
            (leader, edge.destination_rank, layer): starts[layout.group_index(layer)]
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
                f"transfer {self._reservation.transfer_id}: tokens [{copy.start_token}, {copy.end_token}) "
                f"of {copy} were not due"
            )
        self._copied_to[copy.key] = copy.end_token
        self.copied_bytes += copy.payload_bytes
        if copy.end_token == self._reservation.end_token:
            self._missing.discard(copy.key)

    def missing(self) -> str:
        """The missing keys of which every token has landed on the leader: "layer 3 from decode rank 0 to rank 1"."""
        groups: dict[tuple[int, int], list[int]] = {}
        for leader, rank, layer in self._missing:
            if self._landed_to.get((leader, layer)) == self._reservation.end_token:
                groups.setdefault((leader, rank), []).append(layer)
        return "; ".join(
            f"{name_numbers('layer', layers)} from decode rank {leader} to rank {rank}"
            for (leader, rank), layers in sorted(groups.items())
        )
