"""Ports for processes that start on a known address, or restart on their address."""

from __future__ import annotations

import random
import socket

# Linux assigns ports from 32768 on by itself, Mooncake chooses from 15000 to 17000.
FIRST_PORT, END_PORT = 18_000, 32_000


def free_port() -> int:
    """Returns a free loopback port outside the ranges that the system and Mooncake assign."""
    choose = random.SystemRandom()
    for _ in range(100):
        port = choose.randrange(FIRST_PORT, END_PORT)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no port is free from {FIRST_PORT} to {END_PORT - 1}")
