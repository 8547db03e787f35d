"""The messages between a worker and its process of the pool: one packet of JSON each. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from headrace_kv.plan.saved_shards import StridedCopy
from headrace_kv.pool.memory import OWN_SHARD, PoolMemory, ShardSource

PACKET_BYTES_MAX: Final = 192 * 1024
"""Fits the socket's default buffer."""

Operation = Literal["exists", "get", "put"]


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """What a process of the pool starts with. `master` is host:port; `host` is this worker's address.

    `admitted`: networks that may connect to the process, by text. None means every host.
    """

    master: str
    host: str
    secret: bytes
    memories: tuple[PoolMemory, ...]
    protocol: str = "tcp"
    rdma_devices: str = ""
    admitted: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True)
class PoolCall:
    """A call of RemotePool."""

    call_id: int
    operation: Operation
    keys: tuple[str, ...]
    memory: int = 0
    slots: tuple[int, ...] = ()
    shard: int = OWN_SHARD


@dataclass(frozen=True, slots=True)
class PoolReply:
    """The end of a call. With `lost`, the store has failed, and the process ends."""

    call_id: int
    done: tuple[bool, ...] = ()
    lost: str = ""


READY: Final = PoolReply(0)
"""The first reply, once the process can be called."""


def setup_to_packet(setup: PoolSetup) -> bytes:
    values = {**asdict(setup), "secret": setup.secret.hex()}
    return json.dumps(values, separators=(",", ":")).encode()


def setup_from_packet(packet: bytes) -> PoolSetup:
    values = json.loads(packet)
    values["secret"] = bytes.fromhex(values["secret"])
    values["memories"] = tuple(_memory(one) for one in values["memories"])
    if values["admitted"] is not None:
        values["admitted"] = tuple(values["admitted"])
    return PoolSetup(**values)


def _memory(values: dict[str, Any]) -> PoolMemory:
    others = (
        ShardSource(other["object_bytes"], tuple(StridedCopy(**one) for one in other["copies"]))
        for other in values["others"]
    )
    return PoolMemory(**{**values, "others": tuple(others)})


def call_to_packet(call: PoolCall) -> bytes:
    return json.dumps(asdict(call), separators=(",", ":")).encode()


def call_from_packet(packet: bytes) -> PoolCall:
    values: dict[str, Any] = json.loads(packet)
    return PoolCall(**{**values, "keys": tuple(values["keys"]), "slots": tuple(values["slots"])})


def reply_to_packet(reply: PoolReply) -> bytes:
    return json.dumps(asdict(reply), separators=(",", ":")).encode()


def reply_from_packet(packet: bytes) -> PoolReply:
    values: dict[str, Any] = json.loads(packet)
    return PoolReply(**{**values, "done": tuple(values["done"])})
