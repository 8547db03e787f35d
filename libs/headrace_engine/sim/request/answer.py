"""The events of one decode request of a sim engine, for its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace_engine.interface import DecodeEnded, DecodeEvent, DecodeEvents
from headrace_engine.sim.request.event_queue import DecodeEventQueue
from headrace_engine.sim.request.sequence import Sequence


class SimAnswer(DecodeEvents):
    """Starts its request at the first read, and ends it after the last event, with an error, or by `abort`."""

    def __init__(self, start: Callable[[], Sequence], end: Callable[[Sequence], None]) -> None:
        """`start` submits the request and raises as Engine.decode does. `end` takes its caller from it."""
        self._start = start
        self._end = end
        self._sequence: Sequence | None = None
        self._unread: deque[DecodeEvent] = deque()
        self._ended = False

    def follow(self, on_events: Callable[[], None]) -> None:
        self._events.follow(on_events)

    def take(self) -> list[DecodeEvent]:
        if self._ended:
            return []
        try:
            events = self._events.take()
        except Exception:
            self.abort()
            raise
        if events and isinstance(events[-1], DecodeEnded):
            self.abort()
        return events

    async def __anext__(self) -> DecodeEvent:
        while not self._unread:
            if self._ended:
                raise StopAsyncIteration
            try:
                await self._events.wait()
            except BaseException:
                # As a generator that is cancelled while it waits.
                self.abort()
                raise
            self._unread.extend(self.take())
        return self._unread.popleft()

    def abort(self) -> None:
        self._ended = True
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            self._end(sequence)

    @property
    def _events(self) -> DecodeEventQueue:
        if self._sequence is None:
            self._sequence = self._start()
        assert self._sequence.generation is not None
        return self._sequence.generation.events
