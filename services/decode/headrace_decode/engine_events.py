"""An engine's events of one request, from the task that runs it to the link or the HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, InternalError
from headrace_engine.interface import DecodeEnded, DecodeEvent

CLOSE_TIMEOUT_S = 5.0

PutEvent: TypeAlias = Callable[[DecodeEvent], None]


class EngineEvents:
    """Runs a request on a task of its own.

    Events gather until a caller reads them, or until `forward`. The request bounds them: an engine yields at most one
    event per token. `name` identifies the request in errors.
    """

    def __init__(self, run: Callable[[PutEvent], Coroutine[Any, Any, None]], name: str) -> None:
        self._name = name
        self._events: list[DecodeEvent] = []
        self._error: Exception | None = None
        self._ended = False
        """Whether nothing follows `_events` but `_error`, if there is one."""
        self._readable = asyncio.Event()
        """Whether there are events, an error or the end."""
        self._sink: PutEvent | None = None
        self._on_error: Callable[[Exception], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(run(self._put), name=f"engine events of {name}")
        self._task.add_done_callback(self._finish)

    def forward(
        self, sink: PutEvent, on_error: Callable[[Exception], None], deadline: Deadline
    ) -> None:
        """From now on each event goes to `sink` at once, and the error without an end to `on_error`, once.

        The error is as in `read`. What `sink` raises is one, too. The deadline ends the request.
        """
        self._sink, self._on_error = sink, on_error
        self._timer = asyncio.get_running_loop().call_later(
            deadline.remaining_s(), lambda: self.interrupt(self._deadline_error())
        )
        events, self._events = self._events, []
        for event in events:
            self._use_sink(event)
        if self._error is not None:
            self._report(self._error)

    def interrupt(self, error: Exception) -> None:
        """Stops the engine's request. `error` is raised once all events are read."""
        if self._ended:
            return
        self._task.cancel()
        self._fail(error)

    async def wait_readable(self) -> None:
        """Returns once there are events, an error or the end. Not after `forward`."""
        await self._readable.wait()

    async def read(self, deadline: Deadline) -> DecodeEvent:
        """The oldest event.

        Raises the engine's own error, InternalError when the engine ended without DecodeEnded, or DeadlineExceeded.
        """
        if not self._readable.is_set():
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await self._readable.wait()
            except TimeoutError:
                raise self._deadline_error() from None
        if not self._events:
            raise self._error or self._early_end()
        event = self._events.pop(0)
        if not self._events and not self._ended:
            self._readable.clear()
        return event

    async def close(self) -> bool:
        """Aborts the engine's request. False when that took too long."""
        self._ended, self._sink, self._on_error = True, None, None
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_S)
        return self._task.done()

    def _put(self, event: DecodeEvent) -> None:
        if self._ended:
            return
        self._ended = isinstance(event, DecodeEnded)
        if self._sink is None:
            self._events.append(event)
            self._readable.set()
        else:
            self._use_sink(event)

    def _use_sink(self, event: DecodeEvent) -> None:
        if self._sink is None:
            return
        try:
            self._sink(event)
        except Exception as error:  # noqa: BLE001 - the engine and its other requests go on
            self._task.cancel()
            self._fail(error)

    def _finish(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if not self._ended:
            self._fail(error if isinstance(error, Exception) else self._early_end())

    def _fail(self, error: Exception) -> None:
        self._ended, self._error = True, error
        self._readable.set()
        self._report(error)

    def _report(self, error: Exception) -> None:
        on_error, self._sink, self._on_error = self._on_error, None, None
        if on_error is not None:
            on_error(error)

    def _early_end(self) -> InternalError:
        return InternalError(f"the engine ended {self._name} without a reason")

    def _deadline_error(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the deadline passed while waiting for the engine in {self._name}",
            metadata={"waited_for": "engine"},
        )
