"""Shortens the naps of a thread of Mooncake's, whose end holds up the whole process."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

_MICROSECONDS = 1_000_000


def set_accept_timeout(port: int, timeout_s: float) -> bool:
    """Sets how long an accept on a listening port of this process's own waits; whether there is such a socket.

    A Mooncake engine that ends joins a thread that accepts handshakes and looks up once a second, and Python's lock
    is held meanwhile: nothing else in the process runs. A wait that is under way keeps its old length.
    """
    seconds, microseconds = divmod(round(timeout_s * _MICROSECONDS), _MICROSECONDS)
    found = False
    for entry in Path("/proc/self/fd").iterdir():
        listener = _listener(int(entry.name))
        if listener is None:
            continue
        with listener:
            if listener.getsockname()[1] == port:
                limit = struct.pack("@ll", seconds, microseconds)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                found = True
    return found


def _listener(descriptor: int) -> socket.socket | None:
    """A copy of a descriptor that is a listening TCP socket; the descriptor may be gone."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockopt(
        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    ):
        return copy
    copy.close()
    return None
