"""Admission: what waits, what is refused with which estimate, and that nothing leaks."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, InvalidRequest, QueueFull
from headrace_router.admission.admission import Admission, AdmissionLimits, AdmissionPermit

# Made at import: it must outlast the whole run.
_LATER = Deadline.after(24 * 3600)


def _admission(requests: int = 2, tokens: int = 100, wait_s: float = 0.05) -> Admission:
    return Admission(AdmissionLimits(requests, tokens, wait_s), dict)


async def _until_one_waits(admission: Admission) -> None:
    async with asyncio.timeout(5):
        while admission.waiting != 1:
            await asyncio.sleep(0.001)


async def test_beyond_the_bound_requests_are_refused_at_once_with_an_estimate() -> None:
    admission = _admission(wait_s=10.0)
    tickets = [await admission.enter("a", _LATER) for _ in range(2)]
    started_s = time.monotonic()
    with pytest.raises(QueueFull) as first:
        await admission.enter("a", _LATER)
    assert time.monotonic() - started_s < 5.0
    assert first.value.retry_after_s == 0.5
    assert first.value.metadata["tenant_share"] == "2"
    # Requests last 8 s here: of the two, one ends every 4 s.
    admission.leave(tickets.pop(), 8.0)
    tickets.append(await admission.enter("a", _LATER))
    with pytest.raises(QueueFull) as second:
        await admission.enter("a", _LATER)
    assert second.value.retry_after_s == pytest.approx(4.0)
    for ticket in tickets:
        admission.leave(ticket, 1.0)
    assert admission.requests == 0


async def test_a_tenant_below_its_share_gets_the_next_place() -> None:
    admission = _admission(wait_s=5.0)
    tickets = [await admission.enter("greedy", _LATER) for _ in range(2)]
    late = asyncio.create_task(admission.enter("late", _LATER))
    await _until_one_waits(admission)
    admission.leave(tickets[0], 1.0)
    assert (await late).tenant == "late"
    with pytest.raises(QueueFull, match="2 of 2 requests are in use, 1 of them by tenant greedy"):
        await admission.enter("greedy", _LATER)


async def test_waiting_ends_at_the_bound_or_at_the_deadline_and_leaves_nothing() -> None:
    admission = _admission(wait_s=0.05)
    tickets = [await admission.enter("greedy", _LATER) for _ in range(2)]
    with pytest.raises(QueueFull):
        await admission.enter("late", _LATER)
    with pytest.raises(DeadlineExceeded, match="room for 1 requests"):
        await admission.enter("late", Deadline.after(0.01))
    given_up = asyncio.create_task(admission.enter("late", _LATER))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    # Granted and given up in the same moment.
    given_up = asyncio.create_task(admission.enter("late", _LATER))
    await asyncio.sleep(0)
    admission.leave(tickets.pop(), 1.0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert (admission.requests, admission.waiting) == (1, 0)


async def _ticket(admission: Admission, tenant: str, tokens: int) -> AdmissionPermit:
    ticket = await admission.enter(tenant, _LATER)
    await ticket.queue_tokens(tokens)
    return ticket


async def test_queued_tokens_are_bounded_until_the_first_token() -> None:
    admission = _admission(requests=10)
    first = await _ticket(admission, "a", 80)
    second = await admission.enter("a", _LATER)
    with pytest.raises(QueueFull, match="queued tokens") as refused:
        await second.queue_tokens(30)
    assert refused.value.retry_after_s
    first.first_token()
    first.first_token()
    await second.queue_tokens(100)
    # What is full by now is known before anything is done for a request.
    with pytest.raises(QueueFull):
        await admission.enter("a", _LATER)
    with admission.holding(second):
        assert admission.queued_tokens == 100
    admission.leave(first, 1.0)
    assert (admission.queued_tokens, admission.requests) == (0, 0)


async def test_another_tenant_gets_its_share_of_the_tokens() -> None:
    admission = _admission(requests=10, wait_s=5.0)
    greedy = [await _ticket(admission, "greedy", 50) for _ in range(2)]
    late = asyncio.create_task(_ticket(admission, "late", 40))
    await _until_one_waits(admission)
    greedy[0].first_token()
    assert (await late).tenant == "late"


async def test_a_prompt_that_can_never_wait_is_a_wrong_request() -> None:
    ticket = await _admission().enter("a", _LATER)
    with pytest.raises(InvalidRequest, match="makes 101 tokens"):
        await ticket.queue_tokens(101)
