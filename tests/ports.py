"""Ports for processes that start on a known address, or restart on their address."""

from __future__ import annotations

import itertools
import os
import random
import socket

# Linux assigns ports from 32768 on by itself, Mooncake chooses from 15000 to 17000.
FIRST_PORT, END_PORT = 18_000, 32_000
# Each process of a parallel test run has a share of its own, so that no two of them choose one port.
SHARES = 8
_PORTS_PER_SHARE = (END_PORT - FIRST_PORT) // SHARES
_share_start = (
    FIRST_PORT
    + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    % SHARES
    * _PORTS_PER_SHARE
)
# Runs at the same time begin at different ports.
_offsets = itertools.count(random.SystemRandom().randrange(_PORTS_PER_SHARE))


def free_port() -> int:
    """Returns a free loopback port outside the ranges that the system and Mooncake assign.

    A process returns no port twice before it has returned all of its share.
    """
    for offset in itertools.islice(_offsets, 100):
        port = _share_start + offset % _PORTS_PER_SHARE
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"none of 100 ports from {_share_start} on is free")
