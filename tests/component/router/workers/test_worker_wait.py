"""Requests that arrive before any decode worker is known, or after the last one is lost."""

from __future__ import annotations

import asyncio

import pytest

from headrace_common.errors import InvalidRequest, NoDecodeWorker
from tests.kit.router import Rig, text_of, with_settings
from tests.kit.workers import CONTEXT_TOKENS, reply, reserve_and_die
from tests.waiting import PATIENCE_S, let_a_wrong_step_show, until

# Longer than any test takes.
pytestmark = with_settings(worker_wait_s=120.0)


async def test_a_request_waits_for_workers_that_left_the_registry(rig: Rig) -> None:
    await rig.add_decode(reply("ok"))
    assert await rig.text() == "ok"
    rig.router.update([])
    asking = asyncio.create_task(rig.text())
    await let_a_wrong_step_show()
    assert not asking.done()
    rig.refresh()
    assert await asking == "ok"


async def test_a_request_without_tokens_waits_for_the_next_incarnation(rig: Rig) -> None:
    dying = await rig.add_decode(reserve_and_die)
    asking = asyncio.create_task(rig.ask())
    await until(lambda: bool(dying.background))
    await asyncio.gather(*dying.background)
    await let_a_wrong_step_show()
    assert not asking.done()
    rig.decodes.remove(dying)
    await rig.add_decode(reply("ok"))
    responses = await asking
    assert text_of(responses) == "ok"
    assert responses[-1].timing.attempts == 2


async def test_the_limits_of_the_late_worker_apply(rig: Rig) -> None:
    asking = asyncio.create_task(rig.error_of(text="x" * 2 * CONTEXT_TOKENS))
    await let_a_wrong_step_show()
    await rig.add_decode(reply("ok"))
    assert isinstance(await asking, InvalidRequest)


async def test_an_explanation_does_not_wait(rig: Rig) -> None:
    with pytest.raises(NoDecodeWorker):
        async with asyncio.timeout(PATIENCE_S):
            await rig.route()
