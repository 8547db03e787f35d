"""Bounds the connections to one port of this process: in all, and of one host.

gRPC bounds them in all, and then closes new ones. So one host could shut out all others. This closes idle connections
of the hosts with the most, so that there is room for others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import resource
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LOG = logging.getLogger(__name__)

_CHECK_S: Final = 0.2
_DESCRIPTORS: Final = Path("/proc/self/fd")
# For connections that the process opens, its files and its libraries.
_RESERVED_DESCRIPTORS: Final = 512
# Above this share of the bound, idle connections are closed until others fit.
_FULL_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Connections in all, and of one host."""

    total: int
    per_host: int


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection of a caller. `peer` is as in gRPC, such as "ipv4:10.0.0.7:40112"."""

    descriptor: int
    host: str
    peer: str


def reserve_descriptors(wanted: int) -> int:
    """Raises the limit of open files for `wanted` connections. Returns how many fit beside what the process needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = wanted + _RESERVED_DESCRIPTORS
    if needed > soft:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fitting = max(1, soft - _RESERVED_DESCRIPTORS)
    if fitting < wanted:
        _LOG.warning(
            "max_connections is %d, but the limit of open files leaves %d: raise it (ulimit -n)",
            *(wanted, fitting),
        )
    return min(wanted, fitting)


def surplus(
    connections: Sequence[Connection], busy: Collection[str], bounds: ConnectionBounds
) -> list[Connection]:
    """The connections to close: none with an RPC in flight, and most of the hosts with the most."""
    idle: dict[str, list[Connection]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    for connection in connections:
        counts[connection.host] += 1
        if connection.peer not in busy:
            idle[connection.host].append(connection)
    closed: list[Connection] = []
    for host, count in counts.items():
        for _ in range(min(count - bounds.per_host, len(idle[host]))):
            closed.append(idle[host].pop())
            counts[host] -= 1
    excess = len(connections) - len(closed) - int(bounds.total * _FULL_SHARE)
    return closed + _of_largest(idle, counts, excess)


def _of_largest(
    idle: Mapping[str, list[Connection]], counts: Mapping[str, int], excess: int
) -> list[Connection]:
    """`excess` idle connections, so that the largest remaining count of a host is as small as possible."""
    if excess <= 0:
        return []
    # The n-th connection of a host is closed before every m-th of another with m below n.
    ranked = [
        (counts[host] - place, host, connection)
        for host, owned in idle.items()
        for place, connection in enumerate(owned)
    ]
    ranked.sort(key=lambda one: one[:2], reverse=True)
    return [connection for _, _, connection in ranked[:excess]]


class ConnectionGuard:
    """Keeps the connections to a port of this process within bounds, from `start` to `close`.

    `busy` returns the peers of which an RPC is in flight.
    """

    def __init__(self, bounds: ConnectionBounds, busy: Callable[[], Collection[str]]) -> None:
        self._bounds = bounds
        self._busy = busy
        self._task: asyncio.Task[None] | None = None

    def start(self, port: int) -> None:
        """Guards this port from now on."""
        self._task = asyncio.create_task(self._guard(port))

    async def close(self) -> None:
        """Ends the guard."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _guard(self, port: int) -> None:
        least = min(self._bounds.per_host, int(self._bounds.total * _FULL_SHARE))
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                if len(os.listdir(_DESCRIPTORS)) > least:  # noqa: PTH208 - cheaper than paths, 5 times a second
                    await self._close_surplus(port)
            except OSError as error:
                # Such as too many open files.
                _LOG.warning("cannot count the connections to port %d: %s", port, error)

    async def _close_surplus(self, port: int) -> None:
        found = await asyncio.to_thread(connections_to, port)
        closed = surplus(found, self._busy(), self._bounds)
        ended = await asyncio.to_thread(_end_all, closed)
        if ended:
            _LOG.warning("closed %d of %d connections to port %d", ended, len(found), port)


def connections_to(port: int) -> list[Connection]:
    """The connections that this process has accepted on a port."""
    found: list[Connection] = []
    for descriptor in list(_DESCRIPTORS.iterdir()):
        connection = _connection_of(int(descriptor.name), port)
        if connection is not None:
            found.append(connection)
    return found


def _connection_of(descriptor: int, port: int) -> Connection | None:
    """None for a descriptor that is no connection to the port, or was closed meanwhile."""
    try:
        with _copy_of(descriptor) as held:
            if held.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if held.type != socket.SOCK_STREAM or held.getsockname()[1] != port:
                return None
            address, peer_port = held.getpeername()[:2]
    except OSError:
        return None
    return Connection(descriptor, *_names_of(address, peer_port))


def _copy_of(descriptor: int) -> socket.socket:
    """Another descriptor of a socket, which stays the same socket when gRPC closes its own. Raises OSError."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        # It is no socket.
        os.close(copy)
        raise


def _names_of(address: str, port: int) -> tuple[str, str]:
    """The host, and the peer as gRPC names it. The addresses of one IPv6 network of 64 bits are one host."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            network = ipaddress.ip_network((ip, 64), strict=False)
            return str(network), f"ipv6:%5B{address.replace('%', '%25')}%5D:{port}"
        ip = ip.ipv4_mapped
    return str(ip), f"ipv4:{ip}:{port}"


def _end_all(connections: Sequence[Connection]) -> int:
    """Shuts down each connection that still has its descriptor. Returns their number."""
    ended = 0
    for connection in connections:
        try:
            with _copy_of(connection.descriptor) as held:
                if _names_of(*held.getpeername()[:2])[1] == connection.peer:
                    held.shutdown(socket.SHUT_RDWR)
                    ended += 1
        except OSError:
            # The caller or gRPC was first.
            continue
    return ended
