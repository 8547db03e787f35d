"""Makes transports by name."""

from __future__ import annotations

import logging

from headrace_common.errors import ConfigError
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.fallback import FallbackTransport
from headrace_kv.transport.in_memory import InMemoryTransport
from headrace_kv.transport.memory import HOST_MEMORY, Memory
from headrace_kv.transport.mooncake.transport import MooncakeTransport, prepare_device_memory
from headrace_kv.transport.same_host.transport import SameHostTransport
from headrace_kv.transport.staging.cost_model import WireCosts, initial_costs
from headrace_kv.transport.staging.scatter_server import LandingLimits
from headrace_kv.transport.staging.transport import StagedTransport, StagingLimits

_log = logging.getLogger(__name__)

# Nothing reaches device memory without a slot, so there are slots for more senders, and refusals are short.
_DEVICE_LIMITS = StagingLimits(
    landing=LandingLimits(senders=32, slot_bytes=2 * 1024 * 1024), retry_s=1.0
)


def open_transport(
    kind: str, host: str, protocol: str = "auto", memory: Memory = HOST_MEMORY
) -> KvTransport:
    """A transport that peers reach at `host`.

    `kind` is "auto" (same_host for peers of this host, else mooncake), "mooncake", "same_host" or "in_memory";
    `protocol` is Mooncake's "auto", "rdma" or "tcp"; `memory` is where the KV lies. "same_host" by name also lets other
    processes of this user into this one where the system asks for that. Raises ConfigError for another kind, or when
    the transport cannot start on this machine.
    """
    if not memory.on_host:
        if not memory.staged:
            prepare_device_memory()
        return _staged(_open(kind, host, protocol), host, memory)
    if kind == "auto":
        return FallbackTransport([*_open_same_host(), open_transport("mooncake", host, protocol)])
    inner = _open(kind, host, protocol)
    # Host memory goes over RDMA run by run: an entry costs about as much as the copy of it that staging would save,
    # and a landing area would be pinned for every rank.
    slow_entries = isinstance(inner, MooncakeTransport) and inner.protocol == "tcp"
    return _staged(inner, host, memory) if slow_entries else inner


def _staged(inner: KvTransport, host: str, memory: Memory) -> KvTransport:
    protocol = f"/{inner.protocol}" if isinstance(inner, MooncakeTransport) else ""
    costs = WireCosts(initial_costs(inner.name + protocol))
    limits = StagingLimits() if memory.on_host else _DEVICE_LIMITS
    return StagedTransport(inner, host, costs, limits, memory=memory)


def _open(kind: str, host: str, protocol: str) -> KvTransport:
    """One that carries bytes as they are."""
    if kind == "auto":
        return FallbackTransport([*_open_same_host(), MooncakeTransport(host, protocol)])
    if kind == "mooncake":
        return MooncakeTransport(host, protocol)
    if kind == "same_host":
        return SameHostTransport(permit_tracers=True)
    if kind == "in_memory":
        return InMemoryTransport()
    raise ConfigError(
        f'there is no transport "{kind}": choose auto, mooncake or in_memory, or same_host'
    )


def _open_same_host() -> list[KvTransport]:
    try:
        return [SameHostTransport()]
    except ConfigError as error:
        _log.info("%s", error)
        return []
