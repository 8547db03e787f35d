"""Makes transports by name."""

from __future__ import annotations

import logging

from headrace_common.errors import ConfigError
from headrace_kv.transport.base import KvTransport

_log = logging.getLogger(__name__)


def open_transport(kind: str, host: str, protocol: str = "auto") -> KvTransport:
    """A transport that peers reach at `host`.

    `kind` is "auto" (same_host for peers of this host, else mooncake), "mooncake", "same_host" or "in_memory";
    `protocol` is Mooncake's "auto", "rdma" or "tcp". "same_host" by name also lets other processes of this user into
    this one where the system asks for that. Raises ConfigError for another kind, or when the transport cannot start on
    this machine.
    """
    if kind == "auto":
        return _open_preferred(host, protocol)
    if kind == "mooncake":
        return _open_mooncake(host, protocol)
    if kind == "same_host":
        from headrace_kv.transport.same_host import SameHostTransport

        return SameHostTransport(permit_tracers=True)
    if kind == "in_memory":
        from headrace_kv.transport.in_memory import InMemoryTransport

        return InMemoryTransport()
    raise ConfigError(
        f'there is no transport "{kind}": choose auto, mooncake or in_memory, or same_host'
    )


def _open_mooncake(host: str, protocol: str) -> KvTransport:
    from headrace_kv.transport.mooncake import MooncakeTransport

    mooncake = MooncakeTransport(host, protocol)
    if mooncake.protocol != "tcp":
        return mooncake
    # Only over TCP does an entry cost so much that copying twice is cheaper.
    from headrace_kv.transport.packed import PackedTransport

    return PackedTransport(mooncake, host)


def _open_preferred(host: str, protocol: str) -> KvTransport:
    from headrace_kv.transport.preferred import PreferredTransport
    from headrace_kv.transport.same_host import SameHostTransport

    transports = [open_transport("mooncake", host, protocol)]
    try:
        transports.insert(0, SameHostTransport())
    except ConfigError as error:
        _log.info("%s", error)
    return PreferredTransport(transports)
