"""The events of a worker's prefix cache as data. Pure. Mirrors protos/headrace/worker/v1/worker.proto."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum
from functools import reduce
from operator import xor
from typing import Literal, NamedTuple

import numpy as np

from headrace.worker.v1 import worker_pb2
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import ProtocolViolation

EventKind = Literal["stored", "removed", "snapshot", "cleared", "heartbeat"]

HASH_BYTES = 8
LOAD_TIME_MAX_S = 3_600.0


class Tier(IntEnum):
    """Where blocks are stored. A tier's announced set holds the blocks in this and all faster tiers."""

    DEVICE = worker_pb2.KV_TIER_DEVICE
    HOST = worker_pb2.KV_TIER_HOST
    DISK = worker_pb2.KV_TIER_DISK
    REMOTE = worker_pb2.KV_TIER_REMOTE


_TIERS = frozenset(map(int, Tier))


class KvEvent(NamedTuple):
    """One message of SubscribeKvEvents. `block_count` and `hash_xor` digest the tier's announced set after the event.

    `packed` holds distinct hashes as little-endian u64. Stored blocks come parents first, removed blocks children
    first. `last` ends a snapshot. A plain tuple, because a router makes thousands of events a second.
    """

    incarnation: str
    sequence: int
    tier: int
    kind: EventKind
    packed: bytes
    block_count: int
    hash_xor: int
    last: bool = False


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Hashes as little-endian u64."""
    return array("Q", hashes).tobytes()


def unpack_hashes(packed: bytes) -> list[int]:
    """The reverse of `pack_hashes`."""
    return array("Q", packed).tolist()


def xor_of(hashes: Iterable[int]) -> int:
    """The digest of a few hashes: their exclusive or, which is independent of order."""
    return reduce(xor, hashes, 0)


def xor_of_packed(packed: bytes) -> int:
    """The same digest of many packed hashes, without a Python step for each."""
    return int(np.bitwise_xor.reduce(np.frombuffer(packed, "<u8"), initial=np.uint64(0)))


def event_from_proto(message: worker_pb2.SubscribeKvEventsResponse) -> KvEvent:
    """Converts a message. Raises ProtocolViolation when it is malformed."""
    kind = message.WhichOneof("event")
    last = False
    if kind == "stored":
        packed = message.stored
    elif kind == "removed":
        packed = message.removed
    elif kind == "snapshot":
        packed, last = message.snapshot.hashes, message.snapshot.last
    elif kind is None:
        raise ProtocolViolation("a KV event of an unknown kind")
    else:
        packed = b""
    if len(packed) % HASH_BYTES:
        raise ProtocolViolation(f"{len(packed)} bytes are not a whole number of hashes")
    tier = message.tier
    if tier not in _TIERS:
        raise ProtocolViolation(f"a KV event of an unknown tier: {tier}")
    return KvEvent(
        message.incarnation,
        message.sequence,
        tier,
        kind,
        packed,
        message.announced_count,
        message.announced_xor,
        last,
    )


def load_time_from_proto(message: worker_pb2.SubscribeKvEventsResponse) -> float | None:
    """Seconds to load a block from the event's tier; None without. Raises ProtocolViolation when out of range."""
    if not message.heartbeat.HasField("load_time_per_block"):
        return None
    load_s = seconds_from_duration(message.heartbeat.load_time_per_block)
    if not 0.0 <= load_s <= LOAD_TIME_MAX_S:
        raise ProtocolViolation(
            f"load_time_per_block must be 0 s to {LOAD_TIME_MAX_S:g} s, not {load_s:g} s"
        )
    return load_s


def event_to_proto(event: KvEvent) -> worker_pb2.SubscribeKvEventsResponse:
    """Converts an event to its message."""
    message = worker_pb2.SubscribeKvEventsResponse(
        incarnation=event.incarnation,
        sequence=event.sequence,
        tier=worker_pb2.KvTier.ValueType(event.tier),
        announced_count=event.block_count,
        announced_xor=event.hash_xor,
    )
    match event.kind:
        case "stored":
            message.stored = event.packed
        case "removed":
            message.removed = event.packed
        case "snapshot":
            message.snapshot.hashes = event.packed
            message.snapshot.last = event.last
        case "cleared":
            message.cleared.SetInParent()
        case "heartbeat":
            message.heartbeat.SetInParent()
    return message
