"""Connections of peers that the network has cut off."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct

import pytest

from headrace_kv.transport import guard
from headrace_kv.transport.guard import (
    LOST_AFTER_S,
    end_lost_connections,
    open_listeners,
    own_tcp_sockets,
)
from headrace_kv.transport.mooncake import MooncakeTransport

# A real clock, because the kernel has no other. The last probe may be late.
SLACK_S = 10.0
# Classic BPF: return zero, which drops the packet.
DROP_ALL = struct.pack("@HBBI", 6, 0, 0, 0)


def test_a_connection_ends_when_its_peer_is_cut_off() -> None:
    """A filter that drops every packet of one of two peers is the cut."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end_lost_connections({listener.getsockname()[1]})
        lost, kept = (socket.create_connection(listener.getsockname()) for _ in range(2))
        at_lost, at_kept = (listener.accept()[0] for _ in range(2))
        with lost, kept, at_lost, at_kept:
            code = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
            header = struct.pack("@HP", 1, ctypes.addressof(code))
            at_lost.setsockopt(socket.SOL_SOCKET, guard._SO_ATTACH_FILTER, header)
            lost.sendall(b"late")
            at_lost.settimeout(LOST_AFTER_S + SLACK_S)
            with pytest.raises(TimeoutError) as caught:
                at_lost.recv(1)
            # The kernel's error. That of the socket's own timeout has no number.
            assert caught.value.errno == errno.ETIMEDOUT
            kept.sendall(b"kept")
            assert at_kept.recv(4) == b"kept"


def test_connections_to_an_engine_are_probed() -> None:
    known = open_listeners()
    transport = MooncakeTransport("127.0.0.1", "tcp")
    try:
        assert transport.session
        probed = [
            bool(own.copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
            for own in own_tcp_sockets()
            if own.listens and own.inode not in known
        ]
        # The data port and the port of the handshake.
        assert probed == [True, True]
    finally:
        transport.close()
