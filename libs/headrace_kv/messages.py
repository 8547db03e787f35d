"""The messages of a handoff, and their conversion to and from protobuf. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.engine.v1.link_pb2 import SentLink
from headrace.kv.v1 import handoff_pb2
from headrace_kv.copy_plan import BlockSpan
from headrace_kv.layout import TOKENS, KvLayout, WorkerRef


@dataclass(frozen=True, slots=True)
class TransferTarget:
    """Where one prompt's KV cache goes.

    Tokens [start_token, end_token) are those that decode lacks, which the router has from decode's reservation.
    The transfer fails at `deadline_s` of the host's monotonic clock. With `with_hidden_state`, that
    of the last token is sent too. `ticket` is the router's permission to fill the transfer, empty where there is
    no router.
    """

    transfer_id: str
    decode: WorkerRef
    handoff_endpoint: str
    start_token: int
    end_token: int
    deadline_s: float
    with_hidden_state: bool = False
    ticket: bytes = b""


def prefix_transfer(transfer_id: str) -> str:
    """The transfer that brings a prefill worker what decode has of the prompt of another transfer."""
    return f"{transfer_id}.prefix"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Decode's blocks for one transfer, the same on every decode rank.

    `block_ids` are of the layout's first cache group, `further_block_ids` of the others, in order. Block i of a list
    holds tokens from (start_token // block_tokens + i) * block_tokens, by decode's block_tokens of the group. A state
    group has one page. Where a group's tokens are not addressable, start_token is a multiple of its block_tokens.
    Nothing is written into blocks before CacheGroup.first_sent_token, which may have any id.
    """

    transfer_id: str
    block_ids: tuple[int, ...]
    start_token: int
    end_token: int
    further_block_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def block_ids_by_group(self) -> tuple[tuple[int, ...], ...]:
        """Block lists in the order of the layout's cache groups."""
        return (self.block_ids, *self.further_block_ids)

    def find_fault(self, layout: KvLayout) -> str:
        """Why the blocks cannot hold the tokens in decode's `layout`; "" when they can."""
        start, end = self.start_token, self.end_token
        if not 0 <= start <= end:
            return f"has tokens [{start}, {end})"
        lists = self.block_ids_by_group
        if len(lists) != len(layout.groups):
            return f"has blocks of {len(lists)} cache groups instead of {len(layout.groups)}"
        for group, block_ids in zip(layout.groups, lists, strict=True):
            if len(block_ids) < group.blocks_between(start, end):
                return f"has {len(block_ids)} blocks of {group.name} for tokens [{start}, {end})"
            if group.kind == TOKENS and not group.token_addressable and start % group.block_tokens:
                return f"starts at token {start}, inside a block of {group.block_tokens}"
        return ""


def first_sent_tokens(layout: KvLayout, reservation: Reservation) -> dict[int, int]:
    """The first token of the reservation that is sent, by layer. Its end for a layer of which none is."""
    start, end = reservation.start_token, reservation.end_token
    return {
        layer: first
        for group in layout.groups
        for first in (group.first_sent_token(start, end),)
        for layer in group.layers
    }


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Tokens [start_token, end_token) of one layer, written to prefill's cache and ready to be sent.

    `block_ids` are the request's source blocks of the layer's cache group, in token order from token 0. Where tokens
    are not addressable, start_token is a multiple of block_tokens, and so is end_token unless it ends the transfer.
    A state is pushed once, when it is final: end_token is the transfer's, and block_ids has its one page. Blocks before
    CacheGroup.first_sent_token may have any id, as may blocks before start_token. With `in_host_memory` they are blocks
    of SenderContext.host_memory; all layers of the same tokens have them there.
    `ready_ns` is when the engine pushed the range, by time.monotonic_ns.
    """

    transfer_id: str
    layer: int
    start_token: int
    end_token: int
    block_ids: tuple[int, ...]
    ready_ns: int
    in_host_memory: bool = False


@dataclass(frozen=True, slots=True)
class SendReport:
    """What one prefill rank did for one transfer. Made once, when the transfer is quiet.

    `reason` is "" for a committed transfer, else a reason of the error tree. `control_bytes` counts the serialized
    messages about the transfer on the handoff stream, in both directions, without gRPC's frames. `host` is that of the
    rank's memory, empty where its session has none. `memory` is "host", "device" or "device_staged", see the schema.
    """

    transfer_id: str
    rank: int
    reason: str
    detail: str
    links: tuple[SentLink, ...] = ()
    control_bytes: int = 0
    host: str = ""
    memory: str = "host"

    @property
    def payload_bytes(self) -> int:
        """Bytes of the writes that have landed and were acknowledged."""
        return sum(link.payload_bytes for link in self.links)

    def kind_of(self, link: SentLink) -> str:
        """ "same_host" where both ends of a link are on one host, else "network"."""
        return "same_host" if self.host == link.destination_host else "network"


def reserved_span(
    layout: KvLayout, reservation: Reservation, group_index: int, start_token: int, end_token: int
) -> BlockSpan:
    """Tokens [start_token, end_token) of one cache group, with the reserved blocks as source and destination."""
    blocks = np.asarray(reservation.block_ids_by_group[group_index], dtype=np.int64)
    first = reservation.start_token
    first -= first % max(1, layout.groups[group_index].block_tokens)
    return BlockSpan(start_token, end_token, blocks, first, blocks, first)


def reservation_to_proto(reservation: Reservation) -> handoff_pb2.Reservation:
    return handoff_pb2.Reservation(
        transfer_id=reservation.transfer_id,
        block_ids=reservation.block_ids,
        start_token=reservation.start_token,
        end_token=reservation.end_token,
        further_block_ids=[
            handoff_pb2.BlockList(block_ids=block_ids)
            for block_ids in reservation.further_block_ids
        ],
    )


def reservation_from_proto(message: handoff_pb2.Reservation) -> Reservation:
    return Reservation(
        message.transfer_id,
        tuple(message.block_ids),
        message.start_token,
        message.end_token,
        tuple(tuple(group.block_ids) for group in message.further_block_ids),
    )
