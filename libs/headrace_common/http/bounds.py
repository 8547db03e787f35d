"""The bounds on what clients send to an HTTP listener."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEAD_BYTES_MAX: Final = 65_536
"""Bytes of the request line and the headers. Beyond it: status 431."""
HEADERS_MAX: Final = 128
"""Headers and trailers of one request. Beyond it: status 431."""
HEAD_WAIT_S: Final = 10.0
"""Time for the handshake of a connection, and then for the headers of each request from their first byte."""
BODY_WAIT_S: Final = 30.0
"""Time for the body of a request, beside that for its bytes."""
BODY_BYTES_PER_S: Final = 256 * 1024
"""A body of images has more time: a second for so many bytes that have arrived."""
BODY_PAUSE_S: Final = 10.0
"""Time in which some bytes of a body must arrive, and all of a body that is not read any more."""
CONNECTION_IDLE_S: Final = 300.0
"""Time without a request before a client's connection is closed."""
PIPELINED_MAX: Final = 16
"""Requests that wait on a connection for the response to an earlier one."""
UNREAD_BYTES_MAX: Final = 24 * 1024 * 1024
"""Bytes of incomplete headers and of bodies that no handler has begun to read, in one process."""


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """The bounds of one listener. `connections_max` counts handshakes too."""

    connections_max: int
    head_wait_s: float = HEAD_WAIT_S
    body_pause_s: float = BODY_PAUSE_S
    idle_s: float = CONNECTION_IDLE_S
