"""What an engine has said about one request, between the engine's pace and the client's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, InternalError
from headrace_common.process.pacing import FlushPace, LoopLoad
from headrace_engine.interface import DecodeEvent

CLOSE_TIMEOUT_S = 5.0


class EventBuffer:
    """Reads the engine's events into a list and hands out all of them at once.

    The list needs no other bound than the request's own: an engine yields at most one event per
    token.
    """

    def __init__(
        self, events: AsyncIterator[DecodeEvent], what: str, load: LoopLoad | None = None
    ) -> None:
        self._what = what
        self._events: list[DecodeEvent] = []
        self._error: Exception | None = None
        self._ended = False
        self._changed = asyncio.Event()
        self._pace = FlushPace(load or LoopLoad())
        self._reader = asyncio.create_task(self._read(events), name=f"engine events of {what}")

    async def _read(self, events: AsyncIterator[DecodeEvent]) -> None:
        try:
            async for event in events:
                self._events.append(event)
                self._changed.set()
        except Exception as error:  # noqa: BLE001 - handed to whoever takes next
            self._error = error
        finally:
            self._ended = True
            self._changed.set()
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    def interrupt(self, error: Exception) -> None:
        """Hears the engine no more, and raises `error` once everything before has been taken."""
        if not self._ended:
            self._error, self._ended = error, True
            self._changed.set()
            self._reader.cancel()

    async def spoken(self) -> None:
        """Returns once there is something to take: events, an error or the end."""
        await self._changed.wait()

    async def take(self, deadline: Deadline) -> list[DecodeEvent]:
        """All events since the last call, at least one; when they come fast, gathered for a moment.

        Raises the engine's own error, InternalError when the engine ended without DecodeEnded, or
        DeadlineExceeded.
        """
        await self._wait(deadline)
        rest_s = self._pace.batch_s(time.monotonic())
        if rest_s > 0 and not self._ended:
            await asyncio.sleep(rest_s)
        self._pace.record_flush(time.monotonic())
        taken, self._events = self._events, []
        self._note_taken()
        return taken

    async def take_first(self, deadline: Deadline) -> DecodeEvent:
        """The oldest event that was not taken. Raises as `take`."""
        await self._wait(deadline)
        first = self._events.pop(0)
        self._note_taken()
        return first

    async def _wait(self, deadline: Deadline) -> None:
        if not self._changed.is_set():
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await self._changed.wait()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the deadline passed while waiting for the engine in {self._what}",
                    metadata={"waited_for": "engine"},
                ) from None
        if self._events:
            return
        if self._error is not None:
            raise self._error
        raise InternalError(f"the engine ended {self._what} without saying why")

    def _note_taken(self) -> None:
        if not self._events and not self._ended:
            self._changed.clear()

    async def close(self) -> bool:
        """Closes the engine's iterator, which aborts the request. False when that took too long."""
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({self._reader}, timeout=CLOSE_TIMEOUT_S)
        return self._reader.done()
