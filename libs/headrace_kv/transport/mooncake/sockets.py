"""This process's own TCP sockets, those that libraries opened included.

A sender's kernel sends bytes again for about 100 s after the network has failed, also when the sender has ended.
Without its connection, the receiver drops them. A frozen process keeps its connections, because its kernel answers.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_MAPPED = "::ffff:"
# struct tcp_info: of a listening socket, tcpi_unacked counts the connections that wait for accept.
_TCP_INFO_BYTES = 28
_TCP_INFO_UNACKED = 24


@dataclass(frozen=True, slots=True)
class OwnSocket:
    """`copy` is a duplicate of the socket's descriptor: options that are set on it hold for the socket."""

    inode: int
    close_on_exec: bool
    """Whether the flag is set. Python and gRPC set it for every socket, Mooncake for none."""
    copy: socket.socket

    @property
    def listens(self) -> bool:
        return bool(self.copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    @property
    def local_port(self) -> int:
        port: int = self.copy.getsockname()[1]
        return port

    @property
    def local_address(self) -> str:
        """An IPv4 address has its IPv4 form also on an IPv6 socket."""
        return _plain(self.copy.getsockname()[0])

    @property
    def remote_address(self) -> str:
        """The address of the other end, in the form of `local_address`. Raises OSError when it is not connected."""
        return _plain(self.copy.getpeername()[0])

    @property
    def waiting_connections(self) -> int:
        """Connections of a listening socket that wait for accept."""
        info = self.copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(struct.unpack_from("@I", info, _TCP_INFO_UNACKED)[0])


def _plain(address: str) -> str:
    address = address.partition("%")[0]
    return address.removeprefix(_MAPPED) if "." in address else address


def own_tcp_sockets() -> Iterator[OwnSocket]:
    """Every TCP socket of the process. Its copy is closed when the next one is taken."""
    for entry in Path("/proc/self/fd").iterdir():
        found = _own_socket(int(entry.name))
        if found is not None:
            with found.copy:
                yield found


def _own_socket(descriptor: int) -> OwnSocket | None:
    """The socket of a descriptor, which may be closed meanwhile."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode):
            return None
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFD)
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    if copy.family not in _FAMILIES or copy.type != socket.SOCK_STREAM:
        copy.close()
        return None
    return OwnSocket(status.st_ino, bool(flags & fcntl.FD_CLOEXEC), copy)


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
