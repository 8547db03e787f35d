"""Settings of earlier versions that are gone, with what to do instead."""

from __future__ import annotations

from typing import Final

_PROXY: Final = "it is gone: remove it; a proxy in front bounds connections and rates by host"

REMOVED: Final = {
    "max_connections_per_host": _PROXY,
    "max_new_connections_per_s": _PROXY,
    "host_block_s": "it is gone: remove it; no host is blocked",
    "max_rejected_per_s": _PROXY,
    "max_unary_per_s": _PROXY,
}
"""By the name of the setting. The error about the unknown setting ends with this text."""
