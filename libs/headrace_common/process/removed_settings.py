"""Settings of earlier versions that are gone, with what to do instead."""

from __future__ import annotations

from typing import Final

_PROXY: Final = "it is gone: remove it; a proxy in front bounds connections and rates by host"

_LOOK_ASIDE: Final = "it is gone with look-aside: remove it; routers stream all answers"
_NO_LISTENER: Final = (
    "it is gone from workers: remove it; http_listen serves clients of a gateway on decode workers"
)

REMOVED: Final = {
    "look_aside": _LOOK_ASIDE,
    "ticket_ttl_s": _LOOK_ASIDE,
    "max_unused_tickets": _LOOK_ASIDE,
    "listen": _NO_LISTENER,
    "advertise": _NO_LISTENER,
    "connection_age_s": _NO_LISTENER,
    "max_streams_per_connection": _NO_LISTENER,
    "max_connections_per_host": _PROXY,
    "max_new_connections_per_s": _PROXY,
    "host_block_s": "it is gone: remove it; no host is blocked",
    "max_rejected_per_s": _PROXY,
    "max_unary_per_s": _PROXY,
}
"""By the name of the setting. The error about the unknown setting ends with this text."""
