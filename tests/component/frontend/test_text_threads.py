"""Texts are encoded in turn: short beside long ones, tenants one after another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.errors import InvalidRequest
from headrace_frontend.openai.intake import parsed_json
from headrace_frontend.request.computations import COUNT_VALUES, TOKENIZE, TextThreads
from tests.waiting import until

_INLINE, _SHORT, _LONG = 1_000, 10_000, 1_000_000
_LIMIT_S = 20.0


class _Held:
    """Holds the thread of long texts until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def work(self) -> str:
        self.begun.set()
        assert self.released.wait(_LIMIT_S)
        return "held"


@pytest.fixture
async def threads() -> AsyncIterator[TextThreads]:
    threads = TextThreads()
    yield threads
    threads.close()


async def _hold(threads: TextThreads) -> tuple[_Held, asyncio.Task[str]]:
    held = _Held()
    task = asyncio.create_task(threads.run("first", TOKENIZE, _LONG, held.work))
    await until(held.begun.is_set)
    return held, task


async def test_shorter_texts_pass_a_long_one(threads: TextThreads) -> None:
    held, task = await _hold(threads)
    async with asyncio.timeout(_LIMIT_S):
        assert (
            await threads.run("first", TOKENIZE, _INLINE, threading.get_ident)
            == threading.get_ident()
        )
        assert (
            await threads.run("first", TOKENIZE, _SHORT, threading.get_ident)
            != threading.get_ident()
        )
    assert not task.done()
    held.released.set()
    assert await task == "held"


async def test_a_large_body_is_checked_on_a_thread_also_when_it_is_refused(
    threads: TextThreads,
) -> None:
    found: list[int] = []

    def check(data: bytes) -> int:
        found.append(threading.get_ident())
        raise InvalidRequest({"body": "has too many values"})

    parts: Any = SimpleNamespace(
        preparer=SimpleNamespace(threads=threads), size=SimpleNamespace(check_json=check)
    )
    for size in (COUNT_VALUES.loop_max, COUNT_VALUES.loop_max + 1):
        with pytest.raises(InvalidRequest):
            await asyncio.wait_for(parsed_json(parts, "t", bytes(size), list), _LIMIT_S)
    assert [one == threading.get_ident() for one in found] == [True, False]


async def test_tenants_take_turns(threads: TextThreads) -> None:
    held, task = await _hold(threads)
    order: list[str] = []
    tasks = [
        asyncio.create_task(threads.run(tenant, TOKENIZE, _LONG, partial(order.append, tenant)))
        for tenant in ("flood", "flood", "flood", "flood", "other")
    ]
    await asyncio.sleep(0)
    held.released.set()
    await asyncio.wait_for(asyncio.gather(task, *tasks), _LIMIT_S)
    assert order == ["flood", "other", "flood", "flood", "flood"]
