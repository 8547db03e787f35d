"""Members without any answer are tried a few at a time, and again at one rate for all of them."""

from __future__ import annotations

import asyncio

import pytest

from headrace_router.workers.dials import Dials, RetryDelay


class _Member:
    """A member that is tried until `end` is set."""

    def __init__(self, dials: Dials, failures: int = 0) -> None:
        self.retry = RetryDelay(0.001)
        for _ in range(failures):
            self.retry.failed_s()
        self.started_s = 0.0
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._try(dials))

    async def _try(self, dials: Dials) -> None:
        async with dials.turn(self.retry):
            self.started_s = asyncio.get_running_loop().time()
            await self.end.wait()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_few_members_are_tried_at_once() -> None:
    dials = Dials(at_once=2)
    members = [_Member(dials) for _ in range(4)]
    await _settle()
    assert [bool(member.started_s) for member in members] == [True, True, False, False]
    members[0].end.set()
    await _settle()
    assert [bool(member.started_s) for member in members] == [True, True, True, False]
    # One that leaves while it waits takes no turn, and one that leaves while it is tried returns its turn.
    members[3].task.cancel()
    members[1].task.cancel()
    last = _Member(dials)
    await _settle()
    assert last.started_s
    assert not members[3].started_s


async def test_a_turn_returns_from_a_member_that_left_just_when_it_was_granted() -> None:
    dials = Dials(at_once=1)
    async with dials.turn(RetryDelay(0.001)):
        left = _Member(dials)
        await _settle()
    left.task.cancel()
    await _settle()
    assert not left.started_s
    async with asyncio.timeout(5), dials.turn(RetryDelay(0.001)):
        pass


async def test_a_new_member_need_not_wait_for_retries() -> None:
    dials = Dials(retries_per_s=0.1)
    retried = [_Member(dials, failures=1) for _ in range(20)]
    await _settle()
    new = _Member(dials)
    await _settle()
    assert new.started_s
    assert sum(bool(member.started_s) for member in retried) == 1


async def test_silent_members_share_one_rate_of_retries_and_others_do_not_need_it() -> None:
    dials = Dials(retries_per_s=200)
    silent = [_Member(dials, failures=3), *(_Member(dials, failures=1) for _ in range(9))]
    known = _Member(dials, failures=1)
    known.task.cancel()
    known.retry.answered()
    known.retry.failed_s()
    async with asyncio.timeout(5), dials.turn(known.retry):
        pass
    for member in silent:
        member.end.set()
    await asyncio.wait_for(asyncio.gather(*(member.task for member in silent)), 5)
    starts_s = sorted(member.started_s for member in silent)
    assert starts_s[-1] - starts_s[0] == pytest.approx(9 / 200)
    # The first was alone. Of the others, those with fewer failures go first.
    assert silent[0].started_s == starts_s[0]
