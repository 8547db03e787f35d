"""Copies between tiers beside the forward pass."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from headrace_common.errors import TransferFailed
from headrace_engine.connector.step_plan import (
    HostSend,
    PoolMove,
    RequestCopy,
    StepPlan,
    TokenRange,
)
from headrace_engine.connector.tier_executor import TierExecutor
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import TransferTarget
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.load_times import TierLoad
from headrace_kv.tiers.tiers import TierCopy
from headrace_kv.transport.memory import Mark
from tests.waiting import until

STORE = TierCopy(Tier.DEVICE, Tier.HOST, (1,), (2,))
TARGET = TransferTarget("x1", WorkerRef("p0", "1"), "127.0.0.1:1", 0, 4, 1e12)
LOAD = TierCopy(Tier.DISK, Tier.DEVICE, (1,), (2,))
NONE: tuple[set[str], set[str], set[str]] = (set(), set(), set())


class Copier:
    """Makes a copy when the test lets it."""

    def __init__(self) -> None:
        self.made: list[TierCopy] = []
        self.niceness = 0
        self.turn = threading.Semaphore(0)
        self.fails = False
        self.marks: list[Mark] = []
        self.host_is_lost = False

    def copy(self, copy: TierCopy, mark: Mark) -> None:
        assert self.turn.acquire(timeout=20)
        self.marks.append(mark)
        self.made.append(copy)
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if self.fails:
            raise TransferFailed("the disk is broken")

    def close(self) -> None:
        self.made.clear()


class Moves:
    """Records what it moves, and what it does not."""

    def __init__(self) -> None:
        self.begun: list[PoolMove] = []
        self.refused: list[PoolMove] = []

    def begin(self, move: PoolMove) -> None:
        self.begun.append(move)

    def refuse(self, move: PoolMove) -> None:
        self.refused.append(move)

    def close(self) -> None:
        return


@pytest.fixture
def copier() -> Copier:
    return Copier()


@pytest.fixture
def loads() -> list[TierLoad]:
    """What the executor has measured."""
    return []


@pytest.fixture
def tiers(copier: Copier, loads: list[TierLoad]) -> Iterator[TierExecutor]:
    # It has a thread of its own, so waits are real. They end with the awaited event.
    executor = TierExecutor(copier, loads.append)  # type: ignore[arg-type]
    yield executor
    copier.turn.release(100)
    executor.close()


def step(
    tiers: TierExecutor,
    plan: StepPlan | None = None,
    sent: set[str] | None = None,
    received: set[str] | None = None,
    failed: set[str] | None = None,
) -> tuple[set[str], set[str], set[str]]:
    tiers.begin_step(plan or StepPlan())
    return tiers.end_step(sent or set(), received or set(), failed or set())


def copying(copy: TierCopy, **more: dict[str, bool]) -> StepPlan:
    return StepPlan(copies=[RequestCopy("r", copy)], **more)  # type: ignore[arg-type]


def until_reported(tiers: TierExecutor, wanted: tuple[set[str], set[str], set[str]]) -> None:
    found: list[tuple[set[str], set[str], set[str]]] = []

    def reported() -> bool:
        found.append(step(tiers))
        return found[-1] != NONE

    asyncio.run(until(reported))
    assert found[-1] == wanted
    assert step(tiers) == NONE


def test_loads_are_measured(tiers: TierExecutor, copier: Copier, loads: list[TierLoad]) -> None:
    step(tiers, copying(STORE))
    step(tiers, copying(LOAD, loads={"r": False}))
    copier.turn.release(2)
    until_reported(tiers, (set(), {"r"}, set()))
    copier.fails = True
    step(tiers, copying(LOAD, loads={"r": False}))
    copier.turn.release()
    until_reported(tiers, (set(), {"r"}, {"r"}))
    assert [(load.tier, load.block_count, load.failed) for load in loads] == [
        (Tier.DISK, 1, False),
        (Tier.DISK, 1, True),
    ]
    assert all(load.seconds >= 0 for load in loads)


def test_a_request_waits_for_its_load_and_its_transfer(tiers: TierExecutor, copier: Copier) -> None:
    assert step(tiers, copying(LOAD, loads={"r": True}), received={"other"}) == (
        set(),
        {"other"},
        set(),
    )
    assert step(tiers, received={"r"}) == NONE
    copier.turn.release()
    until_reported(tiers, (set(), {"r"}, set()))
    step(tiers, copying(LOAD, loads={"r": True}))
    copier.turn.release()
    asyncio.run(until(lambda: len(copier.made) == 2))
    assert step(tiers) == NONE
    until_failed = step(tiers, received={"r"}, failed={"r"})
    if until_failed == NONE:
        until_reported(tiers, (set(), {"r"}, {"r"}))
    else:
        assert until_failed == (set(), {"r"}, {"r"})


def test_blocks_of_an_ended_request_stay_until_they_are_stored(
    tiers: TierExecutor, copier: Copier
) -> None:
    assert step(tiers, copying(STORE, finished_stores={"r": False})) == NONE
    copier.turn.release()
    until_reported(tiers, ({"r"}, set(), set()))
    # Nothing is under way: freed in the same step.
    assert step(tiers, StepPlan(finished_stores={"r": False})) == ({"r"}, set(), set())


def test_blocks_stay_until_they_are_stored_and_sent(tiers: TierExecutor, copier: Copier) -> None:
    assert step(tiers, copying(STORE, finished_stores={"r": True}), sent={"r", "other"}) == (
        {"other"},
        set(),
        set(),
    )
    copier.turn.release()
    until_reported(tiers, ({"r"}, set(), set()))
    assert step(tiers, StepPlan(finished_stores={"q": True})) == NONE
    assert step(tiers, sent={"q"}) == ({"q"}, set(), set())


def test_a_preemption_waits_for_copies(tiers: TierExecutor, copier: Copier) -> None:
    step(tiers, copying(STORE))
    preempted: list[list[TierCopy]] = []

    def preempt() -> None:
        tiers.preempt(StepPlan(preempted_stores=["r", "unknown"]))
        preempted.append(list(copier.made))

    # A real thread, because the executor's own thread makes the copy.
    preempting = threading.Thread(target=preempt)
    preempting.start()
    copier.turn.release()
    preempting.join(20)
    assert preempted == [[STORE]]


def test_copies_are_made_in_the_order_of_the_plans(tiers: TierExecutor, copier: Copier) -> None:
    copier.turn.release(20)
    for _ in range(5):
        step(tiers, copying(STORE))
        step(tiers, copying(LOAD))
    asyncio.run(until(lambda: len(copier.made) == 10))
    assert copier.made == [STORE, LOAD] * 5


def test_the_forward_pass_goes_before_copies(tiers: TierExecutor, copier: Copier) -> None:
    assert step(tiers, copying(LOAD, loads={"r": False})) == NONE
    copier.turn.release()
    until_reported(tiers, (set(), {"r"}, set()))
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert copier.niceness == max(10, here)


@pytest.mark.parametrize("lost", [False, True])
def test_main_memory_is_sent_between_the_copies_that_it_was_planned_between(
    copier: Copier, lost: bool
) -> None:
    copier.host_is_lost = lost
    sends = [HostSend(number, TokenRange("x1", 0, 4, ((1,),)), number) for number in range(3)]
    order: list[object] = []

    def on_send(send: HostSend, lost: bool) -> None:
        order.append((send, lost))

    executor = TierExecutor(copier, lambda load: None, send=on_send)  # type: ignore[arg-type]
    copier.copy = lambda copy, mark: order.append(copy)  # type: ignore[method-assign]
    copies = [RequestCopy("r", copy) for copy in (STORE, LOAD)]
    executor.begin_step(StepPlan(copies=copies, host_sends=sends))
    executor.begin_step(StepPlan(host_sends=sends[:1]))
    asyncio.run(until(lambda: len(order) == 6))
    first, second, third = ((send, lost) for send in sends)
    assert order == [first, STORE, second, LOAD, third, first]
    executor.close()


@pytest.mark.parametrize("lost", [False, True])
def test_blocks_that_a_failed_device_left_are_not_moved_to_the_pool(
    copier: Copier, lost: bool
) -> None:
    moves = Moves()
    executor = TierExecutor(copier, lambda load: None, moves)  # type: ignore[arg-type]
    copier.host_is_lost = lost
    move = PoolMove(7, fetches=False, prefixes=(1,), block_ids=(2,), timeout_s=1.0)
    executor.begin_step(StepPlan(moves=[move]))
    asyncio.run(until(lambda: bool(moves.begun or moves.refused)))
    assert (moves.begun, moves.refused) == (([], [move]) if lost else ([move], []))
    executor.close()
