"""Shortens the accept call of Mooncake's handshake thread, which delays the end of an engine."""

from __future__ import annotations

import socket
import struct

from headrace_kv.transport.mooncake.sockets import own_tcp_sockets

_MICROSECONDS = 1_000_000


def set_accept_timeout(port: int, timeout_s: float) -> bool:
    """Sets the accept timeout of this process's socket that listens on `port`. Returns whether there is one.

    The destructor of a Mooncake engine joins its handshake thread, which blocks in accept for up to a second. It holds
    Python's GIL meanwhile, so nothing else in the process runs. An accept call in progress keeps its old timeout.
    """
    seconds, microseconds = divmod(round(timeout_s * _MICROSECONDS), _MICROSECONDS)
    limit = struct.pack("@ll", seconds, microseconds)
    found = False
    for own in own_tcp_sockets():
        if own.listens and own.local_port == port:
            own.copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            found = True
    return found
