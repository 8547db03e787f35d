"""Calls in flight, rejected calls and floods of one caller are bounded, and no other caller is refused for them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress

import pytest

from headrace_common.callers import bounds as bounds_module
from headrace_common.callers.bounds import (
    REFUSED_CALLS,
    REFUSED_REJECTIONS,
    REFUSED_UNARY,
    CallerBounds,
    CallerLimits,
)
from headrace_common.callers.rates import CALLERS_MAX, RateByCaller
from headrace_common.errors import (
    HeadraceError,
    InvalidRequest,
    PermissionDenied,
    QueueFull,
    Unauthenticated,
)
from tests.virtually import virtually

HOST = "10.0.0.7"
WAIT_S = 0.05
WRONG = InvalidRequest({"text": "wrong"})


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    monkeypatch.setattr(bounds_module, "_REFUSAL_WAIT_S", WAIT_S)
    return Counter()


def bounds_of(
    refused: Counter[str], calls_max: int = 4, cpu_clock: Callable[[], float] = lambda: 0.0
) -> CallerBounds:
    def count(refusal: str, number: int) -> None:
        refused[refusal] += number

    # The clock stands still, so that no debt is forgotten.
    limits = CallerLimits(calls_max, 10.0, 60.0)
    return CallerBounds(limits, count, clock=lambda: 0.0, cpu_clock=cpu_clock)


def reject(bounds: CallerBounds, caller: str, count: int, error: HeadraceError = WRONG) -> None:
    for _ in range(count):
        with suppress(HeadraceError), bounds.call(caller, HOST):
            raise error


def test_the_calls_of_one_caller_are_bounded_and_another_is_served(refused: Counter[str]) -> None:
    bounds = bounds_of(refused)
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(bounds.call("tenant:a", HOST))
        with (
            pytest.raises(QueueFull, match="4 calls of this caller"),
            bounds.call("tenant:a", HOST),
        ):
            pass
        with bounds.call("tenant:b", HOST):
            assert bounds.calls("tenant:b") == 1
    assert refused == {REFUSED_CALLS: 1}
    with bounds.call("tenant:a", HOST):
        assert bounds.calls("tenant:a") == 1


@virtually
async def test_too_many_rejected_calls_make_the_next_wait_and_be_refused(
    refused: Counter[str],
) -> None:
    bounds = bounds_of(refused)
    reject(bounds, "tenant:a", 20)
    await bounds.pace("tenant:a", HOST)
    reject(bounds, "tenant:a", 1)
    start_s = time.monotonic()
    with pytest.raises(QueueFull, match="more than 10 calls a second") as caught:
        await bounds.pace("tenant:a", HOST)
    assert time.monotonic() - start_s >= WAIT_S - 1e-6
    assert caught.value.retry_after_s
    assert refused == {REFUSED_REJECTIONS: 1}
    await bounds.pace("tenant:b", HOST)


@pytest.mark.parametrize("by_count", [False, True])
@virtually
async def test_a_rejected_call_counts_more_by_the_bytes_of_its_request(
    refused: Counter[str], *, by_count: bool
) -> None:
    bounds = bounds_of(refused)
    for caller, size in (("tenant:a", 5 * 1024 * 1024), ("tenant:b", 4 * 1024 * 1024)):
        with suppress(InvalidRequest), bounds.call(caller, HOST):
            bounds.add_bytes(size)
            if not by_count:
                raise InvalidRequest({"text": "too long"})
            bounds.count_rejection()
    with pytest.raises(QueueFull):
        await bounds.pace("tenant:a", HOST)
    await bounds.pace("tenant:b", HOST)


@virtually
async def test_a_rejected_call_counts_more_by_the_time_of_its_checks(
    refused: Counter[str],
) -> None:
    now_s = 0.0

    def check() -> str:
        nonlocal now_s
        now_s += 0.022
        if reading:
            return "read"
        raise InvalidRequest({"text": "wrong"})

    bounds = bounds_of(refused, cpu_clock=lambda: now_s)
    reading = True
    with bounds.call("tenant:a", HOST):
        assert bounds.timed(check) == "read"
    await bounds.pace("tenant:a", HOST)
    reading = False
    with pytest.raises(InvalidRequest), bounds.call("tenant:a", HOST):
        bounds.timed(check)
    with pytest.raises(QueueFull):
        await bounds.pace("tenant:a", HOST)
    assert bounds.timed(lambda: "outside a call") == "outside a call"


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (WRONG, True),
        (PermissionDenied("no"), True),
        (Unauthenticated("no"), True),
        (QueueFull("full"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@virtually
async def test_calls_that_were_wrong_count_and_those_that_found_no_room_do_not(
    refused: Counter[str], error: HeadraceError, *, counts: bool
) -> None:
    bounds = bounds_of(refused)
    reject(bounds, "tenant:a", 30, error)
    with pytest.raises(QueueFull) if counts else nullcontext():
        await bounds.pace("tenant:a", HOST)


@virtually
async def test_missing_keys_count_for_the_host_and_not_for_its_tenants(
    refused: Counter[str],
) -> None:
    bounds = bounds_of(refused)
    for _ in range(30):
        with suppress(Unauthenticated), bounds.call(HOST, HOST):
            raise Unauthenticated("no key")
    with pytest.raises(QueueFull):
        await bounds.pace(HOST, HOST)
    await bounds.pace("tenant:a", HOST)


@virtually
async def test_refused_calls_beyond_those_that_wait_are_refused_at_once(
    refused: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds_module, "_REFUSAL_WAIT_S", 600.0)
    bounds = bounds_of(refused)
    reject(bounds, HOST, 40)
    waiting = [asyncio.create_task(bounds.pace(HOST, HOST)) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await asyncio.wait_for(bounds.pace(HOST, HOST), 5)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@virtually
async def test_refused_calls_of_all_callers_that_wait_are_bounded_and_leave_nothing(
    refused: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds_module, "_REFUSAL_WAIT_S", 600.0)
    monkeypatch.setattr(bounds_module, "_REFUSALS_WAITING_IN_ALL_MAX", 3)
    bounds = bounds_of(refused)
    callers = [f"10.0.0.{number}" for number in range(4)]
    for caller in callers:
        reject(bounds, caller, 40)

    async def call(caller: str) -> None:
        with bounds.call(caller, caller):
            await bounds.pace(caller, caller)

    waiting = [asyncio.create_task(call(caller)) for caller in callers[:3]]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await asyncio.wait_for(call(callers[3]), 5)
    waiting.pop().cancel()
    await asyncio.sleep(0)
    # One place is free again.
    waiting.append(asyncio.create_task(call(callers[3])))
    await asyncio.sleep(0)
    assert not waiting[-1].done()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not any(map(bounds.calls, callers))
    assert not bounds._waiting


def test_unary_calls_of_one_caller_are_bounded_and_another_is_served(
    refused: Counter[str],
) -> None:
    now_s = 0.0
    limits = CallerLimits(4, 10.0, 60.0, unary_per_s=5.0)
    bounds = CallerBounds(limits, lambda why, n: refused.update({why: n}), lambda: now_s)

    def call(caller: str) -> None:
        with bounds.call(caller, HOST):
            bounds.count_unary()

    for _ in range(11):
        call("tenant:a")
    for _ in range(20):
        with pytest.raises(QueueFull, match="more than 5 unary calls a second") as caught:
            call("tenant:a")
        assert caught.value.retry_after_s == pytest.approx(0.2)
    assert refused == {REFUSED_UNARY: 20}
    call("tenant:b")
    # Refused calls have not made it later.
    now_s = 0.25
    call("tenant:a")


@pytest.mark.parametrize("shared", [False, True])
def test_a_flood_is_reported_unless_another_caller_has_calls_from_its_host(
    refused: Counter[str], *, shared: bool
) -> None:
    bounds = bounds_of(refused, calls_max=1)
    floods: list[str] = []
    floods_elsewhere: list[str] = []
    bounds.report_floods(floods.append)
    bounds.report_floods(floods_elsewhere.append)
    with ExitStack() as held:
        held.enter_context(bounds.call(HOST, HOST))
        if shared:
            held.enter_context(bounds.call("tenant:a", HOST))
        for _ in range(1_100):
            with suppress(QueueFull), bounds.call(HOST, HOST):
                pass
    assert set(floods) == set(floods_elsewhere) == (set() if shared else {HOST})


def test_a_rate_forgets_with_time_and_knows_a_bounded_number_of_callers() -> None:
    now_s = 0.0
    rate = RateByCaller(10.0, 5.0, lambda: now_s)
    for _ in range(8):
        rate.count("a")
    assert rate.excess_s("a") == pytest.approx(0.3)
    assert not rate.excess_s("b")
    now_s = 0.31
    assert not rate.excess_s("a")
    for _ in range(8):
        rate.count("a")
    rate.count("much", 1_000.0)
    assert rate.excess_s("much") == pytest.approx(0.5), "a large debt is forgotten soon, too"
    for number in range(CALLERS_MAX):
        rate.count(f"other {number}")
    assert not rate.excess_s("a")
    assert len(rate._debts) == CALLERS_MAX


@virtually
async def test_work_that_one_call_starts_is_done_before_the_turn_of_the_next(
    refused: Counter[str],
) -> None:
    bounds = bounds_of(refused)
    order: list[str] = []

    async def call(name: str) -> None:
        with bounds.call("tenant:a", HOST):
            # All calls are open by then.
            await asyncio.sleep(0)
            await bounds.wait_turn()
            order.append(f"{name} routed")
            asyncio.get_running_loop().call_soon(order.append, f"{name} sent")
            await asyncio.sleep(0)

    await asyncio.gather(*map(call, "abc"))
    assert order == [f"{name} {step}" for name in "abc" for step in ("routed", "sent")]
