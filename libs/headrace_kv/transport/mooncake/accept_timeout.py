"""Shortens the accept call of Mooncake's handshake thread, which delays the end of an engine."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

_MICROSECONDS = 1_000_000


def set_accept_timeout(port: int, timeout_s: float) -> bool:
    """Sets the accept timeout of this process's socket that listens on `port`. Returns whether there is one.

    The destructor of a Mooncake engine joins its handshake thread, which blocks in accept for up to a second. It holds
    Python's GIL meanwhile, so nothing else in the process runs. An accept call in progress keeps its old timeout.
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
    """A duplicate of a descriptor, if it is a listening TCP socket. The descriptor may be closed meanwhile."""
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
