"""Admission: which requests wait, which are rejected with which retry delay, and that no unit leaks."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, InvalidRequest, QueueFull
from headrace_frontend.admission.admission import Admission, AdmissionLimits, AdmissionPermit
from tests.waiting import until

# Created at import, so it must outlast the whole run.
_LATER = Deadline.after(24 * 3600)


def _admission(requests: int = 2, tokens: int = 100, wait_s: float = 0.05) -> Admission:
    return Admission(AdmissionLimits(requests, tokens, wait_s), dict)


async def test_a_tenant_below_its_share_is_admitted_next() -> None:
    admission = _admission(wait_s=5.0)
    permits = [await admission.admit("greedy", _LATER) for _ in range(2)]
    late = asyncio.create_task(admission.admit("late", _LATER))
    await until(lambda: admission.waiting == 1)
    permits[0].close()
    assert (await late).tenant == "late"
    with pytest.raises(QueueFull, match="2 of 2 requests are in use, 1 of them by tenant greedy"):
        await admission.admit("greedy", _LATER)


async def test_a_wait_ends_at_the_deadline_and_leaks_nothing() -> None:
    admission = _admission(wait_s=0.001)
    permits = [await admission.admit("greedy", _LATER) for _ in range(2)]
    with pytest.raises(DeadlineExceeded, match="room for 1 requests"):
        await admission.admit("late", Deadline.after(0.01))
    cancelled = asyncio.create_task(admission.admit("late", _LATER))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    # Granted and cancelled in the same step of the event loop.
    cancelled = asyncio.create_task(admission.admit("late", _LATER))
    await asyncio.sleep(0)
    permits.pop().close()
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert (admission.requests.pool.used, admission.waiting) == (1, 0)


async def _permit(admission: Admission, tenant: str, tokens: int) -> AdmissionPermit:
    permit = await admission.admit(tenant, _LATER)
    await permit.acquire_tokens(tokens)
    return permit


async def test_queued_tokens_are_bounded_until_the_first_token() -> None:
    admission = _admission(requests=10)
    first = await _permit(admission, "a", 80)
    second = await admission.admit("a", _LATER)
    with pytest.raises(QueueFull, match="queued tokens") as refused:
        await second.acquire_tokens(30)
    assert refused.value.retry_after_s
    first.release_tokens()
    first.release_tokens()
    await second.acquire_tokens(100)
    # A full token pool rejects the next request before any work is done for it.
    with pytest.raises(QueueFull):
        await admission.admit("a", _LATER)
    with closing(second):
        assert admission.tokens.pool.used == 100
    first.close()
    assert (admission.tokens.pool.used, admission.requests.pool.used) == (0, 0)


async def test_another_tenant_gets_its_share_of_the_queued_tokens() -> None:
    admission = _admission(requests=10, wait_s=5.0)
    greedy = [await _permit(admission, "greedy", 50) for _ in range(2)]
    late = asyncio.create_task(_permit(admission, "late", 40))
    await until(lambda: admission.waiting == 1)
    greedy[0].release_tokens()
    assert (await late).tenant == "late"


async def test_a_prompt_beyond_the_token_bound_is_an_invalid_request() -> None:
    permit = await _admission().admit("a", _LATER)
    with pytest.raises(InvalidRequest, match="has 101 tokens"):
        await permit.acquire_tokens(101)


async def _slot(admission: Admission, tenant: str, deadline: Deadline = _LATER) -> AdmissionPermit:
    permit = await admission.admit(tenant, deadline)
    try:
        await permit.acquire_slot("m")
    except BaseException:
        permit.close()
        raise
    return permit


async def test_beyond_its_share_of_the_slots_a_tenant_waits_for_a_while_and_is_rejected() -> None:
    admission = _admission(requests=10, wait_s=0.05)
    admission.resize_slots("m", 2)
    held = [await _slot(admission, "a") for _ in range(2)]
    with pytest.raises(QueueFull, match="2 of 2 decode slots are in use") as refused:
        await _slot(admission, "a")
    assert refused.value.retry_after_s
    assert refused.value.metadata["queue"] == "slots"
    waiting = asyncio.create_task(_slot(admission, "a"))
    await until(lambda: admission.waiting == 1)
    held.pop().close()
    held.append(await waiting)
    with pytest.raises(DeadlineExceeded):
        await _slot(admission, "a", Deadline.after(0.01))
    assert (admission.used_slots, admission.slots, admission.waiting) == (2, 2, 0)
    for permit in held:
        permit.close()
    assert (admission.used_slots, admission.requests.pool.used) == (0, 0)


async def test_within_its_share_of_the_slots_a_tenant_is_never_rejected() -> None:
    admission = _admission(requests=10, wait_s=0.01)
    admission.resize_slots("m", 2)
    held = [await _slot(admission, "greedy") for _ in range(2)]
    late = asyncio.create_task(_slot(admission, "late"))
    await until(lambda: admission.waiting == 1)
    for _ in range(3):
        # Each waits for longer than the bound.
        with pytest.raises(QueueFull):
            await _slot(admission, "greedy")
    assert not late.done()
    held.pop().close()
    assert (await late).tenant == "late"


async def test_slots_are_bounded_by_the_places_and_by_model() -> None:
    admission = _admission(requests=3)
    permit = await admission.admit("a", _LATER)
    await permit.acquire_slot("unknown")
    assert admission.used_slots == 0
    # A model without a reachable worker keeps its number.
    for slots, expected in ((0, 0), (8, 3), (2, 2), (0, 2)):
        admission.resize_slots("m", slots)
        assert admission.slots == expected
    admission.resize_slots("m", 1)
    await permit.acquire_slot("m")
    assert permit.slot_wait_s == float("inf")


async def test_the_expected_wait_for_a_slot_is_that_of_the_requests_that_get_one_before() -> None:
    admission = _admission(requests=10)
    admission.resize_slots("m", 2)
    first = await _slot(admission, "a")
    assert first.expected_slot_wait_s("m") == 0.0
    second = await _slot(admission, "a")
    third = await admission.admit("b", _LATER)
    # How long a slot is held is not known yet.
    assert third.expected_slot_wait_s("m") == 0.0
    slot = first._slot
    assert slot is not None
    slot._acquired_s -= 4_000.0
    slot.close()
    assert third.expected_slot_wait_s("m") == 0.0
    again = await _slot(admission, "a")
    assert third.expected_slot_wait_s("m") == pytest.approx(2_000.0, rel=0.1)
    assert third.expected_slot_wait_s("unknown") == 0.0
    for permit in (first, second, third, again):
        permit.close()
