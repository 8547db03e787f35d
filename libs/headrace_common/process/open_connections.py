"""The sockets that this process holds: the connections that it has accepted on a port, and the names of their peers."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

_DESCRIPTORS: Final = "/proc/self/fd"
# Addresses of which the host is remembered. Clients keep connections, so each has many requests.
_HOSTS_MAX: Final = 4_096


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection of a caller. `peer` is as in gRPC, such as "ipv4:10.0.0.7:40112"."""

    descriptor: int
    host: str
    peer: str


class PortConnections:
    """The connections that this process has accepted on a port. One thread uses it.

    It remembers which descriptors are none of them: a router has many connections to workers. To ask a descriptor what
    it is costs several times as much as to see that it is the same file as before.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        # By descriptor, the device and the number of the file.
        self._others: dict[int, tuple[int, int]] = {}

    def find(self) -> list[Connection]:
        """The connections that are open now, each once, although another thread may hold a copy of its descriptor."""
        found: dict[tuple[int, int], Connection] = {}
        others: dict[int, tuple[int, int]] = {}
        for descriptor in descriptors():
            try:
                status = os.fstat(descriptor)
            except OSError:
                # It was closed meanwhile.
                continue
            file = status.st_dev, status.st_ino
            connection = None
            if self._others.get(descriptor) != file:
                connection = _connection_of(descriptor, self._port)
            if connection is None:
                others[descriptor] = file
            else:
                found.setdefault(file, connection)
        self._others = others
        return list(found.values())


def connections_to(port: int) -> list[Connection]:
    """The connections that this process has accepted on a port."""
    return PortConnections(port).find()


def descriptors() -> Iterator[int]:
    """The open descriptors of this process, among them one of a folder that is closed by then."""
    return map(int, os.listdir(_DESCRIPTORS))  # noqa: PTH208 - no path for each


def open_descriptors() -> int:
    """How many descriptors are open. Linux has the number as the folder's size since 6.2."""
    return os.stat(_DESCRIPTORS).st_size or len(list(descriptors()))  # noqa: PTH116 - no path for each


def _connection_of(descriptor: int, port: int) -> Connection | None:
    """None for a descriptor that is no connection to the port, or was closed meanwhile."""
    try:
        with copy_of(descriptor) as held:
            if held.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if held.type != socket.SOCK_STREAM or held.getsockname()[1] != port:
                return None
            address, peer_port = held.getpeername()[:2]
    except OSError:
        return None
    return Connection(descriptor, *names_of(address, peer_port))


def copy_of(descriptor: int) -> socket.socket:
    """Another descriptor of a socket, which stays the same socket when gRPC closes its own. Raises OSError."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        # It is no socket.
        os.close(copy)
        raise


def names_of(address: str, port: int) -> tuple[str, str]:
    """The host, and the peer as gRPC names it. The addresses of one IPv6 network of 64 bits are one host."""
    host = host_of(address)
    if "/" in host:
        return host, f"ipv6:%5B{address.replace('%', '%25')}%5D:{port}"
    return host, f"ipv4:{host}:{port}"


@lru_cache(maxsize=_HOSTS_MAX)
def host_of(address: str) -> str:
    """The host of an IP address. The addresses of one IPv6 network of 64 bits are one host."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        # Such as the path of a Unix socket.
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((ip, 64), strict=False))
        ip = ip.ipv4_mapped
    return str(ip)


def host_of_peer(peer: str) -> str:
    """The host of a peer as gRPC names it, such as "ipv4:10.0.0.7:40112"."""
    address = unquote(peer.partition(":")[2]).rpartition(":")[0]
    return host_of(address.strip("[]"))
