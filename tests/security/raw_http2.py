"""Frames of HTTP/2, as a peer sends them that follows no rule of gRPC."""

from __future__ import annotations

import socket
import struct
import time
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
_ACKNOWLEDGED = 1
_END_HEADERS = 4


def frame(kind: int, stream: int = 0, content: bytes = b"", flags: int = 0) -> bytes:
    """One frame."""
    head = struct.pack(">I", len(content))[1:] + bytes([kind, flags])
    return head + struct.pack(">I", stream) + content


def literal(name: bytes, value: bytes) -> bytes:
    """A header without an entry in the table. Both have fewer than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_headers(method: str) -> bytes:
    """The headers of a call."""
    return b"\x83\x86" + b"".join(
        literal(name, value)
        for name, value in (
            (b":path", method.encode()),
            (b":authority", b"x"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
    )


def call(stream: int, headers: bytes) -> bytes:
    """Begins a call, in one frame."""
    return frame(HEADERS, stream, headers, _END_HEADERS)


def call_in_parts(stream: int, headers: bytes, parts: int, content: bytes) -> bytes:
    """Begins a call with the same further headers in each of several frames."""
    between = frame(CONTINUATION, stream, content) * (parts - 1)
    last = frame(CONTINUATION, stream, content, _END_HEADERS)
    return frame(HEADERS, stream, headers) + between + last


class RawPeer:
    """A connection. `acknowledges`: the server's settings, as every library does."""

    def __init__(self, endpoint: str, *, acknowledges: bool) -> None:
        host, _, port = endpoint.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 10)
        self._socket.sendall(_PREFACE + frame(SETTINGS))
        if acknowledges:
            # After the server's own, which comes first.
            self._socket.recv(4_096)
            self._socket.sendall(frame(SETTINGS, flags=_ACKNOWLEDGED))
        self._socket.setblocking(False)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def send(self, data: bytes, wait_s: float = 10.0) -> bool:
        """Sends data while it reads and forgets what comes. False when the server has closed the connection."""
        rest = memoryview(data)
        end_s = time.monotonic() + wait_s
        while rest and time.monotonic() < end_s:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                return False
            if not self.drain():
                return False
        return not rest

    def drain(self) -> bool:
        """Forgets what has come. False when the server has closed the connection."""
        try:
            while data := self._socket.recv(65_536):
                del data
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def closed_within(self, wait_s: float) -> bool:
        """Whether the server closes the connection in this time, while this peer is silent."""
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s:
            if not self.drain():
                return True
            time.sleep(0.02)
        return False
