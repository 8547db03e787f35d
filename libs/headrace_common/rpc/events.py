"""IncidentService: the last events of a process, for operators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from headrace.incident.v1 import incident_pb2, incident_pb2_grpc
from headrace_common.durations import seconds_from_duration
from headrace_common.process.events import EventRing, StoredEvent, event_json

SERVICE: Final = "headrace.incident.v1.IncidentService"
# They take about a millisecond of the event loop.
_EVENTS_AT_ONCE: Final = 64


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
        now_ns = time.monotonic_ns()
        begin_ns = 0
        if request.HasField("last"):
            begin_ns = now_ns - int(seconds_from_duration(request.last) * 1e9)
        events = self._events.since(begin_ns)
        for start in range(0, max(1, len(events)), _EVENTS_AT_ONCE):
            yield incident_pb2.ListEventsResponse(
                clock_offset_ns=time.time_ns() - now_ns,
                events=map(_message, events[start : start + _EVENTS_AT_ONCE]),
            )
            # Others get their turn, however fast the reader is.
            await asyncio.sleep(0)


def _message(one: StoredEvent) -> incident_pb2.Event:
    kind, value = type(one.event).__name__, event_json(one.event)
    return incident_pb2.Event(monotonic_ns=one.monotonic_ns, kind=kind, value=value)
