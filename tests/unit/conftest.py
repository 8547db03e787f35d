"""Async unit tests run in virtual time: a busy machine changes none of their clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from headrace_simulator.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of tests and async fixtures. It waits for no socket, thread or process: see tests/component."""
    return {"virtual": VirtualLoop}
