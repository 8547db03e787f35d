"""How long a step waits when vLLM has nothing to compute."""

from __future__ import annotations

import pytest

from headrace_engine.connector import step_planner
from headrace_engine.connector.step_planner import ANNOUNCEMENT_S, SHORT_STEP_S, StepPlanner
from tests.blocking_clock import BlockingClock
from tests.unit.engine.connector.test_step_planner import admit_receive, new_planner

TIMEOUT_S, EVENT_S = 10.0, 3.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> BlockingClock:
    clock = BlockingClock()
    clock.install(monkeypatch, step_planner)
    return clock


def waiting() -> StepPlanner:
    """A planner with one request that waits for its KV and its first token."""
    planner, _ = new_planner()
    admit_receive(planner, prompt=100, cached=0, add_token=[])
    return planner


def idle_s(planner: StepPlanner, clock: BlockingClock) -> float:
    """Seconds that an idle step waits."""
    start_s = clock.time()
    planner.wait_for_event(TIMEOUT_S)
    return clock.time() - start_s


def test_idle_steps_are_short_while_a_request_is_announced(clock: BlockingClock) -> None:
    planner = waiting()
    clock.call_later(EVENT_S, planner.request_announced)
    assert idle_s(planner, clock) == EVENT_S
    for _ in range(3):
        planner.plan_step((), ())
        assert idle_s(planner, clock) == pytest.approx(SHORT_STEP_S)


def test_idle_steps_are_long_again_after_the_announcement(clock: BlockingClock) -> None:
    planner = waiting()
    planner.request_announced()
    planner.plan_step((), ())
    clock.advance_to(clock.time() + ANNOUNCEMENT_S)
    assert idle_s(planner, clock) == TIMEOUT_S


def test_an_idle_step_without_incoming_transfers_does_not_wait(clock: BlockingClock) -> None:
    assert idle_s(new_planner()[0], clock) == 0
