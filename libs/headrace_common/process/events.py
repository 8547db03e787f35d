"""The last events of this process, for the file of an incident: see incident.proto.

An event is a dataclass, or a message, and becomes text when an operator asks for it. So an event costs about a
microsecond. It must not change afterwards.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc.aio
from google.protobuf import proto
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from pydantic import ConfigDict, TypeAdapter

from headrace.incident.v1 import incident_pb2, incident_pb2_grpc
from headrace_common.durations import seconds_from_duration
from headrace_common.tasks import lower_priority

_LOG = logging.getLogger(__name__)

BYTES_MAX: Final = 16 * 1024**2
ROUTER_BYTES_MAX: Final = 64 * 1024**2
"""Memory of the events of a router, and of another process. Those of an alarm may take as much again."""
EVENT_BYTES: Final = 256
"""What a usual event takes."""
_LINES_MAX: Final = 4_096
_LINE_CHARACTERS_MAX: Final = 512
_ALARM_PAUSE_S: Final = 60.0
"""Alarms that follow one sooner store nothing: what led to the first one is of more use."""
_ALARM_AGE_S: Final = 600.0
"""How far back the events of an alarm go."""
_ALARM_FILES_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the log."""

    level: str
    logger: str
    message: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that an operator will ask about. The events before it are stored until the next alarm."""

    reason: str


StoredEvent: TypeAlias = tuple[int, int, object]
"""When an event happened, by the monotonic clock in nanoseconds, its memory, and the event."""
_TIME: Final = itemgetter(0)


class EventRing:
    """Stores the last events. One thread adds them, and all may add lines of the log."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._events: deque[StoredEvent] = deque()
        self._bytes = 0
        self._lines: deque[StoredEvent] = deque(maxlen=_LINES_MAX)
        self._alarmed: tuple[StoredEvent, ...] = ()
        self._save: Callable[[Sequence[StoredEvent]], None] | None = None

    def save_alarms(self, folder: Path, name: str) -> None:
        """From now on, each alarm also writes its events to a file in the folder. The last 4 of this name stay."""
        self._save = partial(_save_alarm, folder, name)

    def add(self, event: object, size: int = EVENT_BYTES, monotonic_ns: int = 0) -> None:
        """Something has happened, now or at a time after the event before. The oldest events make room."""
        self._events.append((monotonic_ns or time.monotonic_ns(), size, event))
        self._bytes += size
        while self._bytes > self._bytes_max:
            self._bytes -= self._events.popleft()[1]

    def add_message(self, message: Message) -> None:
        """As `add`. Each byte of a serialized message is about 8 in memory."""
        self.add(message, 2 * EVENT_BYTES + 8 * message.ByteSize())

    def allow(self, bytes_max: int) -> None:
        """Events may have so much memory from now on."""
        self._bytes_max = bytes_max

    def add_line(self, line: LogLine) -> None:
        """A line was logged, in any thread."""
        self._lines.append((time.monotonic_ns(), EVENT_BYTES, line))

    def alarm(self, reason: str) -> None:
        """Stores the last events until the next alarm."""
        now_ns = time.monotonic_ns()
        if self._alarmed and now_ns - self._alarmed[-1][0] < _ALARM_PAUSE_S * 1e9:
            return
        self.add(Alarm(reason))
        self._alarmed = self._stored_since(now_ns - int(_ALARM_AGE_S * 1e9))
        if self._save is not None:
            threading.Thread(target=self._save, args=(self._alarmed,), daemon=True).start()

    def since(self, begin_ns: int) -> list[StoredEvent]:
        """The events since then by the monotonic clock, and those of the last alarm, oldest first."""
        found = set(map(id, self._alarmed))
        newer = [one for one in self._stored_since(begin_ns) if id(one) not in found]
        return sorted((*self._alarmed, *newer), key=_TIME)

    def _stored_since(self, begin_ns: int) -> tuple[StoredEvent, ...]:
        # There may be 300,000, and requests wait meanwhile. The lines are first: an alarm is last.
        lines, events = tuple(self._lines), tuple(self._events)
        first = bisect_left(events, begin_ns, key=_TIME)
        return lines[bisect_left(lines, begin_ns, key=_TIME) :] + events[first:]


EVENTS: Final = EventRing()
"""Those of this process."""


class LineStore(logging.Handler):
    """Stores lines of this repository from level INFO as events."""

    def emit(self, record: logging.LogRecord) -> None:
        """Stores a line."""
        if record.levelno >= logging.INFO and record.name.startswith("headrace"):
            message = record.getMessage()[:_LINE_CHARACTERS_MAX]
            EVENTS.add_line(LogLine(record.levelname, record.name, message))


_types: dict[type, TypeAdapter[Any]] = {}


def _type_of(kind: type) -> TypeAdapter[Any]:
    found = _types.get(kind)
    if found is None:
        # A dataclass has its configuration from the type around it. Infinity and NaN have no numbers in JSON.
        config = ConfigDict(ser_json_inf_nan="strings", arbitrary_types_allowed=True)
        around: Any = tuple[kind]  # type: ignore[valid-type]
        found = _types[kind] = TypeAdapter(around, config=config)
    return found


def event_json(event: object) -> str:
    """An event as JSON."""
    if isinstance(event, Message):
        return MessageToJson(event, indent=None)
    return _type_of(type(event)).dump_json((event,)).decode()[1:-1]


def event_from_json(kind: type, text: str) -> object:
    """The event of a dataclass."""
    (event,) = _type_of(kind).validate_json(f"[{text}]")
    return event


INCIDENT_SERVICE: Final = "headrace.incident.v1.IncidentService"
# They take about a millisecond of the event loop.
_EVENTS_AT_ONCE: Final = 64
_PART_BYTES: Final = 64 * 1024


class IncidentServicer(incident_pb2_grpc.IncidentServiceServicer):
    """Sends the events of this process."""

    def __init__(self, events: EventRing) -> None:
        self._events = events

    async def ListEvents(
        self,
        request: incident_pb2.ListEventsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[incident_pb2.ListEventsResponse]:
        """The stored events, a few with each message."""
        begin_ns = 0
        if request.HasField("last"):
            begin_ns = time.monotonic_ns() - int(seconds_from_duration(request.last) * 1e9)
        for part in _parts(self._events.since(begin_ns)):
            yield part
            # Others get their turn, however fast the reader is.
            await asyncio.sleep(0)


def _parts(events: Sequence[StoredEvent]) -> Iterator[incident_pb2.ListEventsResponse]:
    offset_ns = time.time_ns() - time.monotonic_ns()
    part, part_bytes = incident_pb2.ListEventsResponse(clock_offset_ns=offset_ns), 0
    for number, one in enumerate(events, 1):
        part_bytes += one[1]
        part.events.append(_message(one))
        if number % _EVENTS_AT_ONCE and part_bytes < _PART_BYTES:
            continue
        yield part
        part, part_bytes = incident_pb2.ListEventsResponse(clock_offset_ns=offset_ns), 0
    yield part


def _message(one: StoredEvent) -> incident_pb2.Event:
    monotonic_ns, _, event = one
    kind, value = type(event).__name__, event_json(event)
    return incident_pb2.Event(monotonic_ns=monotonic_ns, kind=kind, value=value)


@contextmanager
def incident_writer(path: Path) -> Iterator[Callable[[incident_pb2.ListEventsResponse], None]]:
    """What writes a message to a new file, which only its owner may read, while the block runs. Raises OSError."""
    if path.is_file():
        path.unlink()
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "wb") as raw, gzip.open(raw, "wb") as file:
        output: Any = file
        yield partial(proto.serialize_length_prefixed, output=output)


def _save_alarm(folder: Path, name: str, events: Sequence[StoredEvent]) -> None:
    lower_priority()
    path = folder / f"headrace-{name}-{time.time_ns() // 1_000_000_000}.incident"
    try:
        with incident_writer(path) as write:
            for part in _parts(events):
                part.member.worker_id = name
                write(part)
        # Another name may begin with this one.
        ours = folder.glob(f"headrace-{name}-{'[0-9]' * 10}.incident")
        for old in sorted(ours)[:-_ALARM_FILES_MAX]:
            old.unlink()
    except OSError as error:
        _LOG.warning("cannot store the events of an alarm in %s: %s", path, error.strerror)
