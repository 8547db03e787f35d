"""Runs a service's main coroutine and exits with its status."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, NoReturn

import uvloop

from headrace_common.errors import ConfigError, HeadraceError, RegistryUnavailable

_EXIT_FAILED = 1
_EXIT_MISCONFIGURED = 2
_EXIT_SIGNAL_BASE = 128
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Interrupted(asyncio.CancelledError):
    """A signal came during a blocking part of the start."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """In this context, SIGTERM and SIGINT raise Interrupted in the main thread.

    For blocking calls of a service's start, during which the event loop handles no signal.
    """
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        raise Interrupted(number)

    # Otherwise the loop would handle the signal later too, and cancel the clean-up.
    wakeup = signal.set_wakeup_fd(-1)
    handlers = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    if received:
        # Code in the context dropped the exception.
        raise Interrupted(received[0])


def run_service(prog: str, main: Callable[[], Awaitable[None]]) -> NoReturn:
    """Runs `main` on uvloop and exits with 0 when it returns.

    For a HeadraceError it prints one line on stderr and exits with 2 (ConfigError,
    RegistryUnavailable) or 1. A signal before the service serves cancels `main`, which cleans up. The
    process then exits with 128 + the signal's number. Blocking parts of `main` need `interruptible`.
    """
    try:
        status = uvloop.run(_supervise(main))
    except HeadraceError as error:
        print(f"{prog}: {' '.join(error.detail.split())}", file=sys.stderr)
        misconfigured = isinstance(error, ConfigError | RegistryUnavailable)
        status = _EXIT_MISCONFIGURED if misconfigured else _EXIT_FAILED
    sys.exit(status)


async def _supervise(main: Callable[[], Awaitable[None]]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main())
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except Interrupted as interruption:
        return _EXIT_SIGNAL_BASE + interruption.number
    except asyncio.CancelledError:
        if not received:
            raise
        return _EXIT_SIGNAL_BASE + received[0]
    return 0
