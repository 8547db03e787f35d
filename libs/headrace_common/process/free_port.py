"""A port of loopback for a process that is yet to start."""

from __future__ import annotations

import itertools
import os
import socket
from typing import Final

from headrace_common.errors import ConfigError

FIRST_PORT: Final = 10_000
"""The kernel gives a socket without a port one from 32768 on (Linux, ip_local_port_range). Mooncake takes 15000 to
17000. Between the choice of a port and its use, neither takes one below."""
END_PORT: Final = 15_000
PORTS_PER_PROCESS: Final = 50
"""Processes with neighbouring ids choose different ports."""
_calls = itertools.count()


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port on which no process listens at an IPv4 address.

    A process returns no port twice before it has returned all of its share. Raises ConfigError when none is free.
    """
    shares = (END_PORT - FIRST_PORT) // PORTS_PER_PROCESS
    first = FIRST_PORT + os.getpid() % shares * PORTS_PER_PROCESS
    for call in itertools.islice(_calls, PORTS_PER_PROCESS):
        port = first + call % PORTS_PER_PROCESS
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # A server sets it, too: connections that ended before keep no port from it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise ConfigError(
        f"ports {first} to {first + PORTS_PER_PROCESS - 1} of {host} are all in use: end what listens there"
    )
