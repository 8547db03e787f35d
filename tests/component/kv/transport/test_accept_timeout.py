"""The time that an accept waits, set from outside."""

from __future__ import annotations

import socket
import time

import pytest

from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.mooncake.accept_timeout import set_accept_timeout
from tests.ports import free_port


def test_an_accept_gives_up_when_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert set_accept_timeout(listener.getsockname()[1], 0.05)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_only_a_listening_socket_is_meant() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as connected:
            assert not set_accept_timeout(connected.getsockname()[1], 0.05)
    assert not set_accept_timeout(free_port(), 0.05)


def test_the_end_of_a_mooncake_engine_holds_up_nobody() -> None:
    ends_s = []
    for _ in range(3):
        transport = open_transport("mooncake", "127.0.0.1", "tcp")
        assert transport.session
        # Mooncake's thread naps a second from its start: the end falls into its second nap.
        time.sleep(1.2)
        started_s = time.monotonic()
        transport.close()
        ends_s.append(time.monotonic() - started_s)
    # A busy machine may hold up one of them, the nap would hold up each.
    assert min(ends_s) < 0.5
