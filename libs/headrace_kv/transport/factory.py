"""Makes transports by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headrace_common.errors import ConfigError
from headrace_common.limits import write_quiet_s
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.in_memory import InMemoryTransport
from headrace_kv.transport.memory import HOST_MEMORY, Memory
from headrace_kv.transport.mooncake.transport import open_mooncake
from headrace_kv.transport.networks import Networks
from headrace_kv.transport.staging.scatter_server import LandingLimits
from headrace_kv.transport.staging.strategy import thresholds_of
from headrace_kv.transport.staging.transport import StagedTransport, StagingLimits


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a transport moves KV: see open_transport."""

    host: str
    protocol: str
    memory: Memory
    rdma_devices: tuple[str, ...]
    quiet_s: float


_OPENERS: Final[dict[str, Callable[[_Place], KvTransport]]] = {
    "mooncake": lambda place: open_mooncake(
        place.host, place.protocol, place.memory, place.rdma_devices
    ),
    "in_memory": lambda place: InMemoryTransport(),
}
"""By kind: a transport that writes runs as they are. A new transport adds a line."""

# Device memory is only reachable through a slot, so there are slots for more senders, and a refusal is short.
_DEVICE_LIMITS = StagingLimits(
    landing=LandingLimits(senders=32, slot_bytes=2 * 1024 * 1024), retry_s=1.0
)


def open_transport(
    kind: str,
    host: str,
    protocol: str = "auto",
    memory: Memory = HOST_MEMORY,
    *,
    rdma_devices: Sequence[str] = (),
    admitted: Networks | None = None,
    quiet_s: float = write_quiet_s(),
) -> KvTransport:
    """A transport that peers reach at `host`, from `admitted` until its `admit` is called.

    `kind` is "mooncake" or "in_memory".
    `protocol` is Mooncake's "auto", "rdma" or "tcp". `memory` is the memory that holds the KV.
    `rdma_devices` are the adapters that Mooncake may use over RDMA; empty means all.
    `quiet_s` is how long bytes of a lost sender may still land.

    Raises ConfigError for another kind, or when the transport cannot start on this machine.
    """
    transport = _open(kind, _Place(host, protocol, memory, tuple(rdma_devices), quiet_s))
    # No transport has ports before its session is used.
    transport.admit(admitted)
    return transport


def _open(kind: str, place: _Place) -> KvTransport:
    opener = _OPENERS.get(kind)
    if opener is None:
        raise ConfigError(f'there is no transport "{kind}": choose {" or ".join(_OPENERS)}')
    memory, inner = place.memory, opener(place)
    # Over RDMA, host memory is written run by run: an entry costs about as much as the copy that staging would save,
    # and every rank would pin a landing area.
    if memory.on_host and not inner.stages_host_memory:
        return inner
    limits = StagingLimits() if memory.on_host else _DEVICE_LIMITS
    limits = replace(limits, landing=replace(limits.landing, quiet_s=place.quiet_s))
    return StagedTransport(inner, place.host, thresholds_of(inner.wire), limits, memory=memory)
