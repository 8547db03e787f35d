"""Open calls that are checked again."""

from __future__ import annotations

import asyncio

import pytest

from headrace_common.access.authorizer import Rechecked
from headrace_common.errors import PermissionDenied


@pytest.mark.parametrize("error", [PermissionDenied("the key was removed"), OSError("no file")])
async def test_the_error_of_a_check_ends_the_call(error: Exception) -> None:
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 3:
            raise error

    async def call() -> None:
        with Rechecked(check, 0.001):
            await asyncio.Event().wait()

    with pytest.raises(type(error)) as caught:
        await asyncio.wait_for(call(), 10)
    assert caught.value is error
    assert checks == 3


async def test_a_call_that_is_cancelled_for_another_reason_stays_cancelled() -> None:
    async def call() -> None:
        with Rechecked(lambda: None, 0.001):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
