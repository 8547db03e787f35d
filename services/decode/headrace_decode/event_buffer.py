"""Buffers an engine's events of one request until the client's stream can send them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import NoReturn

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, InternalError
from headrace_engine.interface import DecodeEvent

CLOSE_TIMEOUT_S = 5.0


class EventBuffer:
    """Reads the engine's events on a task of its own.

    The request bounds the buffer: an engine yields at most one event per token. `name` identifies the
    request in errors.
    """

    def __init__(self, events: AsyncIterator[DecodeEvent], name: str) -> None:
        self._name = name
        self._events: list[DecodeEvent] = []
        self._error: Exception | None = None
        self._ended = False
        self.readable = False
        """Whether there are events, an error or the end."""
        # For waits before `notify`.
        self._became_readable = asyncio.Event()
        self._on_readable: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reader = asyncio.create_task(self._fill(events), name=f"engine events of {name}")

    async def _fill(self, events: AsyncIterator[DecodeEvent]) -> None:
        try:
            async for event in events:
                self._events.append(event)
                self._set_readable()
        except Exception as error:  # noqa: BLE001 - the next read raises it
            self._error = error
        finally:
            self._ended = True
            self._set_readable()
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    def notify(self, on_readable: Callable[[], None], deadline: Deadline) -> None:
        """From now on calls `on_readable` whenever the buffer becomes readable; at once if it is.

        Interrupts at the deadline.
        """
        self._on_readable = on_readable
        self._timer = asyncio.get_running_loop().call_later(
            deadline.remaining_s(), lambda: self.interrupt(self._deadline_error())
        )
        if self.readable:
            on_readable()

    def take(self) -> list[DecodeEvent]:
        """All events since the last call, without waiting. Raises as `read`, if there are none."""
        events, self._events = self._events, []
        if not events:
            self._raise_end()
        self._update_readable()
        return events

    def interrupt(self, error: Exception) -> None:
        """Stops reading from the engine. `error` is raised once all buffered events are read."""
        if self._ended:
            return
        self._error, self._ended = error, True
        self._set_readable()
        self._reader.cancel()

    async def wait_readable(self) -> None:
        """Returns once there are events, an error or the end. Not after `notify`."""
        await self._became_readable.wait()

    async def read(self, deadline: Deadline) -> list[DecodeEvent]:
        """All events since the last call, at least one.

        Raises the engine's own error, InternalError when the engine ended without DecodeEnded, or
        DeadlineExceeded.
        """
        await self._wait(deadline)
        return self.take()

    async def read_one(self, deadline: Deadline) -> DecodeEvent:
        """The oldest event. Raises as `read`."""
        await self._wait(deadline)
        first = self._events.pop(0)
        self._update_readable()
        return first

    async def _wait(self, deadline: Deadline) -> None:
        if not self.readable:
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await self._became_readable.wait()
            except TimeoutError:
                raise self._deadline_error() from None
        if not self._events:
            self._raise_end()

    def _raise_end(self) -> NoReturn:
        if self._error is not None:
            raise self._error
        raise InternalError(f"the engine ended {self._name} without a reason")

    def _deadline_error(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the deadline passed while waiting for the engine in {self._name}",
            metadata={"waited_for": "engine"},
        )

    def _set_readable(self) -> None:
        if self.readable:
            return
        self.readable = True
        if self._on_readable is None:
            self._became_readable.set()
        else:
            self._on_readable()

    def _update_readable(self) -> None:
        if not self._events and not self._ended:
            self.readable = False
            self._became_readable.clear()

    async def close(self) -> bool:
        """Closes the engine's iterator, which aborts the request. False when that took too long."""
        self._on_readable = None
        if self._timer is not None:
            self._timer.cancel()
        self._reader.cancel()
        self._ended = True
        with suppress(asyncio.CancelledError):
            await asyncio.wait({self._reader}, timeout=CLOSE_TIMEOUT_S)
        return self._reader.done()
