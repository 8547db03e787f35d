"""Runs a service's main coroutine and exits with its status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from headrace_common.errors import ConfigError, HeadraceError, RegistryUnavailable

_EXIT_FAILED = 1
_EXIT_MISCONFIGURED = 2
_EXIT_SIGNAL_BASE = 128


def run_service(prog: str, main: Callable[[], Awaitable[None]]) -> NoReturn:
    """Runs `main` on uvloop and exits with 0 when it returns.

    For a HeadraceError it prints one line on stderr and exits with 2 (ConfigError,
    RegistryUnavailable) or 1. A signal before the service serves cancels `main`, which cleans up. The
    process then exits with 128 + the signal's number.
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

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        return _EXIT_SIGNAL_BASE + received[0]
    return 0
