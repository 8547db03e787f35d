"""Bounds the connections to one port of this process: in all, and of one host.

gRPC bounds them in all, and then closes new ones. So one host could shut out all others. This closes idle connections
of the hosts with the most, so that there is room for others. A host that floods the port is blocked for a while.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from headrace_common.callers.rates import RateByCaller
from headrace_common.client_config import ClientFacingConfig
from headrace_common.process.host_blocks import HostBlocks, block_hosts
from headrace_common.process.open_connections import (
    Connection,
    PortConnections,
    connections_to,
    copy_of,
    descriptors,
    names_of,
    open_descriptors,
)

_LOG = logging.getLogger(__name__)

_CHECK_S: Final = 0.05
# Connections that other hosts open while this process closes its own do not change the number of descriptors.
_RECHECK_S: Final = 1.0
# The thread looks at so many descriptors a second at most, unless connections come.
_DESCRIPTORS_PER_RECHECK_S: Final = 200
# For connections that the process opens, its files and its libraries.
_RESERVED_DESCRIPTORS: Final = 512
# Above this share of the bound, idle connections are closed until others fit.
_FULL_SHARE: Final = 0.9
CLOSED_SURPLUS: Final = "surplus connection"
CLOSED_BLOCKED: Final = "blocked host"
# A host may open the connections of so many seconds at once.
_BURST_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Connections in all, and of one host.

    A host that opens more than `opened_per_s` is blocked for `block_s`.
    """

    total: int
    per_host: int
    opened_per_s: float = math.inf
    block_s: float = 0.0

    @classmethod
    def from_config(cls, config: ClientFacingConfig) -> ConnectionBounds:
        """The bounds of the settings. Raises this process's limit of open files for all client listeners."""
        return cls(
            reserve_descriptors(config.max_connections, config.client_listeners),
            config.max_connections_per_host,
            config.max_new_connections_per_s,
            config.host_block_s,
        )


def reserve_descriptors(wanted: int, listeners: int = 1) -> int:
    """Raises the limit of open files for `wanted` connections to each of several listeners.

    Returns how many each may have, beside what the process needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = wanted * listeners + _RESERVED_DESCRIPTORS
    if needed > soft:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fitting = max(1, (soft - _RESERVED_DESCRIPTORS) // listeners)
    if fitting < wanted:
        _LOG.warning(
            "max_connections is %d, but the limit of open files leaves %d to a listener: raise it (ulimit -n)",
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

    It runs in a thread of its own, because calls of a flood occupy the event loop. `busy` returns the peers of which an
    RPC is in flight. `count_closed` gets a reason and a number of connections.
    """

    def __init__(
        self,
        bounds: ConnectionBounds,
        busy: Callable[[], Collection[str]],
        count_closed: Callable[[str, int], None],
    ) -> None:
        self._bounds = bounds
        self._busy = busy
        self._count_closed = count_closed
        self._blocks = HostBlocks(bounds.block_s)
        self._in_force: frozenset[str] = frozenset()
        self._opened = RateByCaller(bounds.opened_per_s, _BURST_S * bounds.opened_per_s)
        self._known: frozenset[str] = frozenset()
        """The peers of the last check."""
        self._port = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, port: int) -> None:
        """Guards this port from now on."""
        self._port = port
        self._thread = threading.Thread(target=self._guard, name="connection-guard", daemon=True)
        self._thread.start()

    def block(self, host: str) -> None:
        """Ends all connections of a host that floods the port, and lets it open none for a while. Any thread may."""
        with self._lock:
            if self._blocks.block(host):
                _LOG.warning("blocked %s: it floods this process with calls or connections", host)
                with _logged(self._port):
                    self._enforce(connections_to(self._port))

    async def close(self) -> None:
        """Ends the guard."""
        self._ended.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _guard(self) -> None:
        least = min(self._bounds.per_host, int(self._bounds.total * _FULL_SHARE))
        least = min(least, int(_BURST_S * self._bounds.opened_per_s))
        accepted = PortConnections(self._port)
        others, checked_s = 0, -math.inf
        while not self._ended.wait(_CHECK_S):
            with _logged(self._port):
                # Counting descriptors is cheap, asking each what it is costs a hundred times as much.
                count = open_descriptors()
                recheck_s = _RECHECK_S * max(1.0, count / _DESCRIPTORS_PER_RECHECK_S)
                due = count > least and time.monotonic() - checked_s >= recheck_s
                if self._in_force or count - others > least or due:
                    found = accepted.find()
                    others, checked_s = count - len(found), time.monotonic()
                    self._check(found)

    def _check(self, found: Sequence[Connection]) -> None:
        busy = self._busy()
        closed = surplus(found, busy, self._bounds)
        ended = _end_all(closed)
        if ended:
            _LOG.warning("closed %d of %d connections to port %d", ended, len(found), self._port)
            self._count_closed(CLOSED_SURPLUS, ended)
        for connection in found:
            if connection.peer not in self._known:
                self._opened.count(connection.host)
        self._known = frozenset(connection.peer for connection in found)
        for host in {connection.host for connection in found}:
            if self._opened.excess_s(host):
                self.block(host)
        with self._lock:
            self._enforce(found)

    def _enforce(self, found: Sequence[Connection]) -> None:
        """Ends the connections of blocked hosts. Called with the lock."""
        blocked = self._blocks.current()
        if blocked != self._in_force:
            self._in_force = blocked
            _block_at(self._port, blocked)
        ended = _end_all([one for one in found if one.host in blocked]) if blocked else 0
        if ended:
            self._count_closed(CLOSED_BLOCKED, ended)


@contextmanager
def _logged(port: int) -> Iterator[None]:
    """Logs that connections cannot be counted, such as for too many open files."""
    try:
        yield
    except OSError as error:
        _LOG.warning("cannot count the connections to port %d: %s", port, error)


def _block_at(port: int, hosts: Collection[str]) -> None:
    """Drops the packets of these hosts at the listening sockets of a port."""
    for descriptor in descriptors():
        try:
            with copy_of(descriptor) as held:
                listens = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and held.getsockname()[1] == port:
                    block_hosts([held], hosts)
        except (OSError, IndexError):
            # It is no socket of an address, or was closed meanwhile.
            continue


def _end_all(connections: Sequence[Connection]) -> int:
    """Shuts down each connection that still has its descriptor. Returns their number."""
    ended = 0
    for connection in connections:
        try:
            with copy_of(connection.descriptor) as held:
                if names_of(*held.getpeername()[:2])[1] == connection.peer:
                    held.shutdown(socket.SHUT_RDWR)
                    ended += 1
        except OSError:
            # The caller or gRPC was first.
            continue
    return ended
