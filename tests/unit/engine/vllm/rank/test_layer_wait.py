"""A forward pass waits for missing layers of its own requests, and not for longer than configured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace_common.errors import TransferFailed
from headrace_engine.vllm.rank import step_executor
from headrace_engine.vllm.rank.step_executor import LayerWait
from headrace_engine.vllm.step_plan import OverlappedLoad
from tests.blocking_clock import BlockingClock

LAYERS = 6
NEVER = 1e12


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> BlockingClock:
    clock = BlockingClock()
    clock.install(monkeypatch, step_executor)
    return clock


def load(transfer_id: str = "x1", *, lost: bool = False, deadline: float = NEVER) -> OverlappedLoad:
    number = int(transfer_id[1:])
    return OverlappedLoad(transfer_id, (number * 10, number * 10 + 1), deadline, lost)


def new_wait(wait_s: float, fence: Callable[[], None] = lambda: None) -> LayerWait:
    return LayerWait(LAYERS, wait_s, fence)


def forward(wait: LayerWait, clock: BlockingClock) -> float:
    """Runs a whole forward pass. Returns its duration in seconds."""
    start_s = clock.time()
    for layer in range(LAYERS):
        wait.before_attention(layer)
    wait.end_step()
    return clock.time() - start_s


def test_a_step_waits_once_for_all_its_transfers(clock: BlockingClock) -> None:
    wait = new_wait(0.2)
    wait.begin_step([load("x1"), load("x2")])
    assert forward(wait, clock) == pytest.approx(0.2)
    assert wait.take_invalid_blocks() == {10, 11, 20, 21}
    assert wait.take_invalid_blocks() == set()


def test_only_incomplete_transfers_are_abandoned(clock: BlockingClock) -> None:
    wait = new_wait(0.1)
    wait.layers_arrived("x2", LAYERS, failed=False)
    wait.begin_step([load("x1"), load("x2")])
    forward(wait, clock)
    assert wait.take_invalid_blocks() == {10, 11}


def test_a_transfers_own_deadline_may_end_the_wait_first(clock: BlockingClock) -> None:
    wait = new_wait(5.0)
    wait.layers_arrived("x2", LAYERS - 1, failed=False)
    wait.begin_step([load("x1", deadline=clock.time() + 0.1), load("x2")])
    clock.call_later(0.3, lambda: wait.layers_arrived("x2", LAYERS, failed=False))
    assert forward(wait, clock) == pytest.approx(0.3)
    assert wait.take_invalid_blocks() == {10, 11}


def test_a_failure_ends_the_wait(clock: BlockingClock) -> None:
    wait = new_wait(10.0)
    wait.begin_step([load()])
    clock.call_later(0.1, lambda: wait.layers_arrived("x1", 0, failed=True))
    assert forward(wait, clock) == pytest.approx(0.1)
    assert wait.take_invalid_blocks() == {10, 11}


@pytest.mark.parametrize("arrived_first", [True, False])
def test_a_pass_without_hooks_reads_only_what_arrived_before_it(arrived_first: bool) -> None:
    wait = new_wait(10.0)
    if arrived_first:
        wait.layers_arrived("x1", LAYERS, failed=False)
    wait.begin_step([load()])
    wait.layers_arrived("x1", LAYERS, failed=False)
    wait.end_step()
    assert wait.take_invalid_blocks() == (set() if arrived_first else {10, 11})


def test_arrived_layers_are_fenced_before_they_are_read() -> None:
    fences: list[int] = []
    wait = new_wait(5.0, lambda: fences.append(0))
    wait.begin_step([load(lost=True)])
    wait.before_attention(0)
    assert fences == []
    wait.take_invalid_blocks()
    wait.layers_arrived("x2", LAYERS - 1, failed=False)
    wait.begin_step([load("x2")])
    assert len(fences) == 1
    wait.before_attention(0)
    assert len(fences) == 2
    wait.layers_arrived("x2", LAYERS, failed=False)
    wait.before_attention(LAYERS - 2)
    wait.before_attention(LAYERS - 1)
    # After the first of these, the step awaits nothing any more.
    assert len(fences) == 3
    wait.end_step()
    assert wait.take_invalid_blocks() == set()
    wait.begin_step([load("x2")])
    assert len(fences) == 4


def test_layers_that_cannot_be_fenced_are_abandoned(clock: BlockingClock) -> None:
    def fail() -> None:
        raise TransferFailed("code 700")

    wait = new_wait(5.0, fail)
    wait.layers_arrived("x1", LAYERS, failed=False)
    wait.begin_step([load()])
    assert forward(wait, clock) == 0
    assert wait.take_invalid_blocks() == {10, 11}
