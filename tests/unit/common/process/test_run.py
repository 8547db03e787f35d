"""Signals during blocking parts of a start."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest
import uvloop

from headrace_common.process.run import Interrupted, interruptible, run_service


def test_a_signal_interrupts_blocking_code_and_the_clean_up_may_wait() -> None:
    cleaned: list[str] = []

    async def main() -> None:
        try:
            with interruptible():
                signal.raise_signal(signal.SIGTERM)
                pytest.fail("the signal was ignored")
        finally:
            await asyncio.sleep(0)
            cleaned.append("all")

    with pytest.raises(SystemExit) as ended:
        run_service("kiln", main)
    assert (ended.value.code, cleaned) == (128 + signal.SIGTERM, ["all"])


def test_a_dropped_interruption_is_raised_at_the_end() -> None:
    with pytest.raises(Interrupted), interruptible(), contextlib.suppress(Interrupted):
        signal.raise_signal(signal.SIGINT)


def test_afterwards_the_event_loop_handles_signals_again() -> None:
    async def main() -> bool:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, done.set)
        with interruptible():
            pass
        signal.raise_signal(signal.SIGTERM)
        return await asyncio.wait_for(done.wait(), 20)

    assert uvloop.run(main())
