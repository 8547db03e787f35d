"""The bounds on what clients send to an HTTP listener, and the memory of what nothing has parsed yet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Protocol

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
BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of the bodies that the handlers of one process read, until they are parsed."""


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """The bounds of one listener. `connections_max` counts handshakes too."""

    connections_max: int
    head_wait_s: float = HEAD_WAIT_S
    body_pause_s: float = BODY_PAUSE_S
    idle_s: float = CONNECTION_IDLE_S


class Input(Protocol):
    """What one client sends. `caller` shares the memory with its other inputs."""

    caller: str

    def end_input(self) -> None:
        """Frees the memory, and refuses the request with status 503."""


class InputMemory:
    """Ends inputs while they have more than `bytes_max` together: the oldest of the caller with the most bytes.

    One event loop owns it. An input that is alone is not ended: it has bounds of its own.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._inputs: dict[str, dict[Input, int]] = {}
        self._by_caller: Counter[str] = Counter()
        self.bytes = 0
        """Of all inputs."""

    def hold(self, holder: Input, size: int) -> None:
        """Sets the bytes of an input. May end it, or others."""
        held = self._inputs.setdefault(holder.caller, {})
        growth = size - held.get(holder, 0)
        held[holder] = size
        self._by_caller[holder.caller] += growth
        self.bytes += growth
        while self.bytes > self._bytes_max and self._end_oldest():
            pass

    def release(self, holder: Input) -> None:
        """Forgets an input. Does nothing when it has ended."""
        held = self._inputs.get(holder.caller, {})
        size = held.pop(holder, None)
        if size is None:
            return
        self.bytes -= size
        self._by_caller[holder.caller] -= size
        if not held:
            del self._inputs[holder.caller], self._by_caller[holder.caller]

    def _end_oldest(self) -> bool:
        caller = max(self._by_caller, key=self._by_caller.__getitem__)
        held = self._inputs[caller]
        if len(held) == len(self._inputs) == 1:
            return False
        oldest = next(iter(held))
        self.release(oldest)
        oldest.end_input()
        return True


UNREAD_INPUT: Final = InputMemory(UNREAD_BYTES_MAX)
READ_BODIES: Final = InputMemory(BODIES_BYTES_MAX)
