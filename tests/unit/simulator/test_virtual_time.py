"""Time passes only while nothing can run."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace_common.errors import InternalError
from headrace_simulator.virtual_time import run_virtually


def test_the_clocks_of_the_process_come_back() -> None:
    clocks = time.monotonic, time.monotonic_ns, time.time, time.time_ns

    async def fail() -> None:
        assert time.monotonic is not clocks[0]
        raise ValueError("as it must")

    with pytest.raises(ValueError, match="as it must"):
        run_virtually(fail)
    assert (time.monotonic, time.monotonic_ns, time.time, time.time_ns) == clocks


def test_a_wait_without_an_end_is_an_error() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(InternalError, match="cannot go on"):
        run_virtually(work)
