"""Advances the clocks of sim engines in other processes, over a Unix socket.

The test listens and the engines connect, so that one test drives every engine of a deployment. An
engine connects only when its model name has the setting `clock`, as in "sim:clock=/tmp/x/clock".
Each message is a line with a time in seconds: the controller sends the time to advance to, and the
engine sends it back once its step loop waits again.

    async with ClockController(tmp_path / "clock") as clock:
        model = f"sim:prefill_s_per_token=1,decode_step_s=1,clock={clock.path}"
        ...                                  # start the prefill and decode workers with this model
        await clock.wait_connected(2)
        ...                                  # send a request; its prompt has 10 tokens
        await clock.advance(10)              # prefill has computed the prompt; nothing is decoded yet
        await clock.advance_until(answered, step_s=1)

The path may have at most about 100 characters, and no comma.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from headrace_common.errors import ConfigError
from headrace_engine.sim.clock import EventLoopClock, ManualClock, SimClock

_logger = logging.getLogger(__name__)
_TICK_S = 0.005
_POLL_S = 0.002


class RemoteClock(ManualClock):
    """A manual clock that a ClockController advances.

    When the controller goes away, the clock follows real time, so that engines can end their work.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as exc:
            raise ConfigError(
                f"model.clock is {self._path!r}: no ClockController listens there ({exc})",
                metadata={"field": "model.clock", "value": self._path},
            ) from exc
        self._follower = asyncio.create_task(self._follow(reader, writer), name="sim clock")

    async def close(self) -> None:
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


def open_clock(path: str) -> SimClock:
    """The clock of an engine with the setting `clock=path`; real time when the path is empty."""
    return RemoteClock(path) if path else EventLoopClock()


class ClockController:
    """Listens on a Unix socket and advances every connected engine; for tests. See the module."""

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
