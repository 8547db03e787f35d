"""Tasks and threads that run beside others, bounded queues and dictionaries, and waits for silent peers."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from headrace_common.errors import QueueFull

_NICENESS: Final = 10
"""Beside a thread of normal priority on one processor, it leaves a tenth of the time."""


def lower_priority() -> None:
    """Lowers the priority of the calling thread, and of threads that it starts. It cannot be raised again."""
    # Linux has a priority for each thread. Raising it needs a permission.
    thread_id = threading.get_native_id()
    niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread_id))
    os.setpriority(os.PRIO_PROCESS, thread_id, niceness)


_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


BUGS: Final = Counter[str]()
"""How many bugs were reported since the start of the process, by what they have interrupted."""


def report_bug(name: str, error: BaseException) -> None:
    """Logs an error with its traceback, and counts it. What `name` does goes on."""
    _log.critical("%s met a bug", name, exc_info=error)
    BUGS[name] += 1


async def repeat_after_bugs(loop: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Runs `loop`, and again 1 s after each error, which is reported as a bug. Returns when `loop` does."""
    while True:
        try:
            return await loop()
        except Exception as error:  # noqa: BLE001 - reported as a bug
            report_bug(name, error)
        await asyncio.sleep(_AGAIN_S)


def run_forever(loop: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
    """Starts a task that runs `loop`, and again 1 s after each error. It ends when it is cancelled, or with `loop`."""
    return asyncio.create_task(repeat_after_bugs(loop, name), name=name)


async def end_task(task: asyncio.Task[_Result] | None) -> None:
    """Cancels a task and waits for its end."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


async def run_together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Returns when all have ended. The first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BackgroundTasks:
    """Tasks that their owner starts, and waits for at its own end. One event loop owns it.

    `name` is what they do, for the report of a bug.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Future[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None] | asyncio.Task[None]) -> None:
        """Starts a task, or keeps one that runs."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            report_bug(self._name, error)

    async def wait(self) -> None:
        """Returns when none is left."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


async def wait_briefly(awaited: Awaitable[Any], seconds: float) -> None:
    """Returns when `awaited` is over, after `seconds` at the latest."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaited


class BoundedQueue(asyncio.Queue[_Value]):
    """A queue of at most `maxsize` items. `name` is for errors."""

    def __init__(self, name: str, maxsize: int) -> None:
        super().__init__(maxsize)
        self._name = name

    def put_nowait(self, item: _Value) -> None:
        """Adds an item, or raises QueueFull."""
        try:
            super().put_nowait(item)
        except asyncio.QueueFull:
            raise QueueFull(
                f"queue {self._name} is full with {self.maxsize} items",
                metadata={"queue": self._name, "maxsize": str(self.maxsize)},
            ) from None


def call_when_done(future: Future[_Result], callback: Callable[[Future[_Result]], None]) -> None:
    """Calls back on the running event loop once a thread's future is done; never after the loop has closed."""
    loop = asyncio.get_running_loop()

    def on_done(done: Future[_Result]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, done)

    future.add_done_callback(on_done)


# A timer that is later than this shows that this event loop has not run either. Messages may wait in it.
OWN_DELAY_S: Final = 0.5
_AGAIN_S: Final = 1.0


async def wait_silent(silent_since_s: Callable[[], float | None], limit_s: float) -> float:
    """Returns once a peer has been silent for `limit_s`, and for how long.

    `silent_since_s` gives the time of its latest message, or of the first request after it, by the event loop's clock.
    None: nothing is expected from it now.
    """
    loop = asyncio.get_running_loop()
    wait_s = limit_s
    while True:
        due_s = loop.time() + wait_s
        await asyncio.sleep(wait_s)
        since_s, now_s = silent_since_s(), loop.time()
        if since_s is None:
            wait_s = limit_s
        elif now_s < since_s + limit_s:
            wait_s = since_s + limit_s - now_s
        elif now_s > due_s + OWN_DELAY_S:
            wait_s = _AGAIN_S
        else:
            return now_s - since_s


class Recent(OrderedDict[_Key, _Value]):
    """The entries that were set last, at most `limit`. Setting one anew makes it the newest."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._limit:
            self.popitem(last=False)
