"""Clocks by which a test advances the computing of sim engines, in its own process and in others.

The test listens on a Unix socket and the engines connect, so that one test drives every engine of a
deployment: tests.suite.stepped_worker starts workers with a RemoteClock. Each message is a line with
a time in seconds: the controller sends the time to advance to, and the engine sends it back once its
step loop waits again.

    async with ClockController(tmp_path / "clock") as clock:
        ...                                  # start prefill and decode workers with RemoteClock(clock.path)
        await clock.wait_connected(2)
        ...                                  # send a request; its prompt has 10 tokens
        await clock.advance(10)              # prefill has computed the prompt; nothing is decoded yet
        await clock.advance_until(answered, step_s=1)

The path may have at most about 100 characters.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace_engine.sim.stepper import SimClock

_logger = logging.getLogger(__name__)
_TICK_S = 0.005
_POLL_S = 0.002
# A task that a step wakes may need a few turns of the event loop to wake another one.
_SETTLE_TURNS = 8
# Due times are sums of fractions of a step.
_ROUNDING_S = 1e-9


class ManualClock(SimClock):
    """Stands still but for `advance`, which runs exactly the simulated steps that end in that time.

    A test gives one to `SimEngine(clock=...)`, or one to several engines:

        clock = ManualClock()
        engine = SimEngine(config, descriptors, clock=clock)   # sim:decode_step_s=1
        ...
        await clock.advance(3)     # three decode steps, however fast or slow the machine is

    Only simulated computing takes its time from the clock. Transfers, deadlines and time stamps are
    real, so a test still waits for the events that depend on them.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None], asyncio.Task[Any]]] = []
        # Tasks that a due time or an event woke, and that have not begun to wait again.
        self._running: set[asyncio.Task[Any]] = set()

    def now_s(self) -> float:
        return self._now_s

    @property
    def next_due_s(self) -> float | None:
        """The earliest time that a task sleeps until; None when no task sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    async def sleep_until(self, due_s: float) -> None:
        if due_s <= self._now_s:
            await asyncio.sleep(0)
            return
        task = _current_task()
        wakeup = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (due_s, next(self._order), wakeup, task))
        self._running.discard(task)
        await wakeup

    async def wait(self, event: asyncio.Event) -> None:
        task = _current_task()
        self._running.discard(task)
        await event.wait()
        self._running.add(task)

    async def advance(self, seconds: float) -> None:
        """Moves the time on, from one due time to the next, and returns when all step loops wait again."""
        await self.advance_to(self._now_s + seconds)

    async def advance_to(self, target_s: float) -> None:
        """As `advance`, to a time. A time in the past changes nothing."""
        await self._settle()
        while (due_s := self.next_due_s) is not None and due_s <= target_s + _ROUNDING_S:
            _, _, wakeup, task = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, due_s)
            self._running.add(task)
            wakeup.set_result(None)
            await self._settle()
        self._now_s = max(self._now_s, target_s)

    async def _settle(self) -> None:
        """Returns when every task that uses the clock waits."""
        while True:
            for _ in range(_SETTLE_TURNS):
                await asyncio.sleep(0)
            self._running = {task for task in self._running if not task.done()}
            if not self._running:
                return


class RemoteClock(ManualClock):
    """A manual clock that a ClockController advances.

    When the controller goes away, the clock follows real time, so that engines can end their work.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._path = path
        self._follower: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Connects with the controller."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        self._follower = asyncio.create_task(self._follow(reader, writer), name="sim clock")

    async def wait(self, event: asyncio.Event) -> None:
        """As ManualClock.wait. The first call connects: the step loop of an engine begins with it."""
        if self._follower is None:
            await self.connect()
        await super().wait(event)

    async def close(self) -> None:
        """Ends the connection."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                await self.advance_to(float(line))
                writer.write(line)
                await writer.drain()
        except (OSError, ValueError) as exc:
            _logger.warning("the connection to the clock controller failed: %s", exc)
        finally:
            writer.close()
        while True:
            await asyncio.sleep(_TICK_S)
            await self.advance(_TICK_S)


class ClockController:
    """Listens on a Unix socket and advances every connected engine. See the module."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 0.0
        self._engines: set[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = set()
        self._connected = asyncio.Condition()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> ClockController:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for _, writer in self._engines:
            writer.close()
        self._engines.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._connected:
            self._engines.add((reader, writer))
            self._connected.notify_all()

    @property
    def engine_count(self) -> int:
        """Engines that are connected, as far as `advance` has noticed."""
        return len(self._engines)

    async def wait_connected(self, count: int, timeout_s: float = 30.0) -> None:
        """Returns when `count` engines or more are connected. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s), self._connected:
            await self._connected.wait_for(lambda: self.engine_count >= count)

    async def advance(self, seconds: float, timeout_s: float = 30.0) -> None:
        """Advances all engines and returns when the step loop of each waits again.

        An engine that has ended is dropped. One that connects later starts at the current time with
        the next call. Raises TimeoutError when an engine does not answer.
        """
        self.now_s += seconds
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(self._advance(*engine) for engine in tuple(self._engines)))

    async def advance_until(
        self, condition: Callable[[], bool], *, step_s: float, timeout_s: float = 30.0
    ) -> None:
        """Advances by `step_s` again and again until the condition holds, with a short real pause each time.

        `timeout_s` is real time. Raises TimeoutError.
        """
        give_up_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"the condition did not hold at simulated time {self.now_s:g} s")
            await self.advance(step_s, timeout_s)
            await asyncio.sleep(_POLL_S)

    async def _advance(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message = f"{self.now_s!r}\n".encode()
        try:
            writer.write(message)
            await writer.drain()
            answer = await reader.readline()
        except OSError:
            answer = b""
        if answer != message:
            self._engines.discard((reader, writer))
            writer.close()


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
