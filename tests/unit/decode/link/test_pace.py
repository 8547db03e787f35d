"""Tokens that may wait go at most once in an interval, and none is forgotten."""

from __future__ import annotations

import asyncio

from headrace_decode.link.session import TokenPace
from tests.waiting import until


async def test_tokens_go_at_once_without_an_interval() -> None:
    pace = TokenPace(lambda: None)
    assert pace.try_release()
    assert pace.try_release()


async def test_the_first_tokens_go_at_once_and_the_next_after_the_interval() -> None:
    calls: list[float] = []
    loop = asyncio.get_running_loop()
    pace = TokenPace(lambda: calls.append(loop.time()))
    pace.set_interval(0.05)
    begun_s = loop.time()
    assert pace.try_release()
    assert not pace.try_release()
    assert not pace.try_release()
    await until(lambda: len(calls) == 1)
    # The loop's clock has steps of a millisecond.
    assert calls[0] - begun_s > 0.045
    assert pace.try_release()


async def test_a_closed_link_is_not_woken() -> None:
    calls: list[None] = []
    pace = TokenPace(lambda: calls.append(None))
    pace.set_interval(0.01)
    assert pace.try_release()
    assert not pace.try_release()
    pace.close()
    await asyncio.sleep(0.05)
    assert not calls
