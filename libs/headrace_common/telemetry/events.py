"""The last events of this process, for the file of an incident: see incident.proto.

An event is stored as a function and its arguments, and becomes a message when an operator asks for it. So an event
costs less than a microsecond. Arguments must not change afterwards.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from headrace.incident.v1 import incident_pb2

BYTES_MAX: Final = 16 * 1024**2
ROUTER_BYTES_MAX: Final = 64 * 1024**2
"""Memory of the events of a router, and of another process."""
EVENT_BYTES: Final = 256
"""What a usual event takes, with its arguments."""
_LINES_MAX: Final = 4_096
_LINE_CHARACTERS_MAX: Final = 512
_ALARM_PAUSE_S: Final = 60.0
"""Alarms that follow one sooner store nothing: what led to the first one tells more."""
_ALARM_AGE_S: Final = 600.0
"""How far back the events of an alarm go."""


class Seen(dict[Any, Any]):
    """What a reader has of this process: an event need not repeat it."""


class StoredEvent(NamedTuple):
    """`describe(message, seen, *arguments)` fills the message of the event."""

    monotonic_ns: int
    size: int
    describe: Callable[..., None]
    arguments: tuple[Any, ...]

    def message(self, seen: Seen) -> incident_pb2.Event:
        """The event for a reader."""
        event = incident_pb2.Event(monotonic_ns=self.monotonic_ns)
        self.describe(event, seen, *self.arguments)
        return event


class EventRing:
    """Stores the last events. One thread adds them, and all may add lines of the log."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._events: deque[StoredEvent] = deque()
        self._bytes = 0
        self._lines: deque[StoredEvent] = deque(maxlen=_LINES_MAX)
        self._alarmed: tuple[StoredEvent, ...] = ()

    def add(self, describe: Callable[..., None], *arguments: Any, size: int = EVENT_BYTES) -> None:
        """Something has happened. `size`: its memory. The oldest events make room."""
        self._events.append(StoredEvent(time.monotonic_ns(), size, describe, arguments))
        self._bytes += size
        while self._bytes > self.bytes_max:
            self._bytes -= self._events.popleft().size

    def add_line(self, level: str, logger: str, message: str) -> None:
        """A line was logged, in any thread."""
        arguments = level, logger, message[:_LINE_CHARACTERS_MAX]
        self._lines.append(StoredEvent(time.monotonic_ns(), EVENT_BYTES, _describe_line, arguments))

    def alarm(self, reason: str) -> None:
        """Something that an operator will ask about: stores the last events until the next alarm."""
        now_ns = time.monotonic_ns()
        if self._alarmed and now_ns - self._alarmed[-1].monotonic_ns < _ALARM_PAUSE_S * 1e9:
            return
        self.add(_describe_alarm, reason)
        self._alarmed = tuple(self._stored_since(now_ns - int(_ALARM_AGE_S * 1e9)))

    def since(self, begin_ns: int) -> list[StoredEvent]:
        """The events since then by the monotonic clock, and those of the last alarm, oldest first."""
        found = dict.fromkeys(map(id, self._alarmed))
        newer = (one for one in self._stored_since(begin_ns) if id(one) not in found)
        return sorted((*self._alarmed, *newer), key=lambda one: one.monotonic_ns)

    def _stored_since(self, begin_ns: int) -> Iterator[StoredEvent]:
        for events in (self._events, self._lines):
            yield from (one for one in tuple(events) if one.monotonic_ns >= begin_ns)


EVENTS: Final = EventRing()
"""Those of this process."""


class LineStore(logging.Handler):
    """Stores lines of this repository from level INFO as events."""

    def emit(self, record: logging.LogRecord) -> None:
        """Stores a line."""
        if record.levelno >= logging.INFO and record.name.startswith("headrace"):
            EVENTS.add_line(record.levelname, record.name, record.getMessage())


def _describe_line(
    event: incident_pb2.Event, seen: Seen, level: str, logger: str, message: str
) -> None:
    event.line.level, event.line.logger, event.line.message = level, logger, message


def _describe_alarm(event: incident_pb2.Event, seen: Seen, reason: str) -> None:
    event.alarm.reason = reason
