"""This process's own TCP sockets, those that libraries opened included."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
