"""Async tests in virtual time: a machine that stands still changes none of their clocks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

from headrace_simulator.virtual_time import VirtualLoop, run_virtually

_P = ParamSpec("_P")


def virtually(test: Callable[_P, Awaitable[None]]) -> Callable[_P, None]:
    """Runs an async test by `run_virtually`. The test uses no socket, no thread and no async fixture."""

    @functools.wraps(test)
    def run(*arguments: _P.args, **options: _P.kwargs) -> None:
        async def work() -> None:
            await test(*arguments, **options)

        run_virtually(work)

    return run


def stand_still(seconds: float) -> None:
    """The process runs nothing for so long: its timers are late."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.pass_over(seconds)
