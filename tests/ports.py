"""Ports for what starts on a known address, or starts again on the address that it had."""

from __future__ import annotations

import random
import socket

# Linux hands out ports from 32768 on by itself, Mooncake chooses from 15000 to 17000.
FIRST_PORT, END_PORT = 18_000, 32_000


def free_port() -> int:
    """A port of loopback that nothing uses, and that the system gives to nobody meanwhile."""
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
