"""Ends connections of peers that the network has cut off, before their blocks are reused (I1).

A sender's kernel sends bytes again for about 100 s after the network has failed, also when the sender has ended.
Without its connection, the receiver drops them. A frozen process keeps its connections, because its kernel answers.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import Final

from headrace_kv.transport.mooncake.sockets import own_tcp_sockets

_FIRST_PROBE_S = 4
_PROBE_INTERVAL_S = 2
_PROBES = 3
LOST_AFTER_S: Final = _FIRST_PROBE_S + _PROBES * _PROBE_INTERVAL_S
"""When a silent connection ends. Shorter than decode's default quarantine_s."""


def end_lost_connections(ports: Collection[int]) -> None:
    """Makes the kernel probe the peers of connections that this process accepts on `ports` from now on."""
    options = (
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _FIRST_PROBE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
        # While an answer to the peer is not acknowledged, no probes are sent.
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    )
    for own in own_tcp_sockets():
        if own.listens and own.local_port in ports:
            # Accepted connections inherit the options.
            for level, option, value in options:
                own.copy.setsockopt(level, option, value)
