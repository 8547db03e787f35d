"""Two machines of one network, and the line between their test programs."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

FIRST_HOST = "10.99.0.1"
SECOND_HOST = "10.99.0.2"
MEET_TIMEOUT_S = 400.0
_MEET_PORT = 7999


def listening() -> socket.socket:
    """The first host's end, before the second one connects."""
    return socket.create_server((FIRST_HOST, _MEET_PORT))


@contextmanager
def accepted(server: socket.socket, timeout_s: float) -> Iterator[TextIO]:
    """The line to the second host, each read of which may take `timeout_s`."""
    server.settimeout(MEET_TIMEOUT_S)
    connection, _ = server.accept()
    with connection, connection.makefile("rw") as line:
        connection.settimeout(timeout_s)
        yield line


@contextmanager
def meet(timeout_s: float) -> Iterator[TextIO]:
    """Connects to the first host, once it is up. Each read of the line may take `timeout_s`."""
    with _connect() as connection, connection.makefile("rw") as line:
        connection.settimeout(timeout_s)
        yield line


def _connect() -> socket.socket:
    give_up_s = time.monotonic() + MEET_TIMEOUT_S
    while True:
        try:
            return socket.create_connection((FIRST_HOST, _MEET_PORT), timeout=2.0)
        except OSError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.2)
