"""Answers gRPC clients that call a port of HTTP/1.1: each RPC gets a status that names the other port (RFC 9113)."""

from __future__ import annotations

import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD_BYTES: Final = 9
_FRAME_BYTES_MAX: Final = 16_384
_HEADERS, _SETTINGS = 1, 4
_ACKNOWLEDGED, _END_OF_STREAM, _END_OF_HEADERS = 1, 1, 4
# A client has some of each RPC. So what is written back is bounded, too.
_FRAMES_MAX: Final = 256
_REMEDY: Final = (
    b"this port serves HTTP/1.1 alone; gRPC is on the port of the setting listen, 7050 by default"
)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return struct.pack(">BHBBL", size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def _field(name: bytes, value: bytes) -> bytes:
    """A header that is not indexed (RFC 7541, 6.2.2), of at most 126 bytes."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


# 0x88 is ":status: 200". A response without a message has its status in these headers.
_REFUSAL: Final = b"\x88" + b"".join(
    _field(name, value)
    for name, value in (
        (b"content-type", b"application/grpc"),
        # UNIMPLEMENTED.
        (b"grpc-status", b"12"),
        (b"grpc-message", _REMEDY),
    )
)


class Http2Refusal:
    """The frames of one connection."""

    def __init__(self) -> None:
        self._data = b""
        self._left_of_preface, self._frames = len(PREFACE), 0

    def feed(self, data: bytes) -> bytes:
        """The answer to bytes that arrived. Raises ValueError for a frame that is too long, and for too many."""
        answer = _frame(_SETTINGS, 0, 0) if self._left_of_preface == len(PREFACE) else b""
        skipped = min(self._left_of_preface, len(data))
        self._left_of_preface -= skipped
        self._data += data[skipped:]
        while len(self._data) >= _HEAD_BYTES:
            high, low, kind, flags, stream = struct.unpack_from(">BHBBL", self._data)
            size = _HEAD_BYTES + (high << 16) + low
            if size > _HEAD_BYTES + _FRAME_BYTES_MAX or self._frames == _FRAMES_MAX:
                raise ValueError("a frame is too long, or one too many")
            if len(self._data) < size:
                break
            self._data = self._data[size:]
            self._frames += 1
            if kind == _SETTINGS and not flags & _ACKNOWLEDGED:
                answer += _frame(_SETTINGS, _ACKNOWLEDGED, 0)
            elif kind == _HEADERS:
                answer += _frame(_HEADERS, _END_OF_STREAM | _END_OF_HEADERS, stream, _REFUSAL)
        return answer
