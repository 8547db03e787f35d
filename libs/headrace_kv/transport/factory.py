"""Makes transports by name."""

from __future__ import annotations

from headrace_common.errors import ConfigError
from headrace_kv.transport.base import KvTransport


def open_transport(kind: str, host: str, protocol: str = "auto") -> KvTransport:
    """A transport that peers reach at `host`.

    `kind` is "mooncake" or "in_memory"; `protocol` is Mooncake's "auto", "rdma" or "tcp". Raises ConfigError for
    another kind, or when the transport cannot start on this machine.
    """
    if kind == "mooncake":
        from headrace_kv.transport.mooncake import MooncakeTransport

        return MooncakeTransport(host, protocol)
    if kind == "in_memory":
        from headrace_kv.transport.in_memory import InMemoryTransport

        return InMemoryTransport()
    raise ConfigError(f'there is no transport "{kind}": choose mooncake or in_memory')
