"""How long a step waits when vLLM has nothing to compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from headrace_engine.vllm.scheduler.step_planner import ANNOUNCEMENT_S, StepPlanner
from tests.unit.engine.vllm.scheduler.test_step_planner import admit_receive, new_planner


def waiting() -> StepPlanner:
    """A planner with one request that waits for its KV and its first token."""
    planner, _ = new_planner()
    admit_receive(planner, prompt=100, cached=0, add_token=[])
    return planner


def idle_s(planner: StepPlanner, timeout_s: float = 10.0) -> float:
    """Seconds that an idle step waits."""
    start_s = time.monotonic()
    planner.wait_for_event(timeout_s)
    return time.monotonic() - start_s


def report_later(report: Callable[[], None]) -> threading.Event:
    """Reports from another thread in a moment. The event is set just before."""
    reported = threading.Event()

    def run() -> None:
        reported.set()
        report()

    threading.Timer(0.05, run).start()
    return reported


@pytest.mark.parametrize("event", ["arrived", "released", "first token"])
def test_an_idle_step_ends_with_an_event_of_a_transfer(event: str) -> None:
    planner = waiting()
    reports = {
        "arrived": lambda: planner.transfer_settled("x1", whole=True),
        "released": lambda: planner.transfer_settled("x1", whole=False),
        "first token": lambda: planner.first_token_received("x1", 7),
    }
    reported = report_later(reports[event])
    assert idle_s(planner) < 5
    # It has waited until then.
    assert reported.is_set()
    # The event stays until a step has planned it.
    assert idle_s(planner) < 5
    planner.plan_step((), ())
    # After a failed transfer there is none to wait for.
    assert (idle_s(planner, 0.5) < 0.4) == (event == "released")


def test_idle_steps_are_short_while_a_request_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than any machine pauses.
    monkeypatch.setattr("headrace_engine.vllm.scheduler.step_planner.ANNOUNCEMENT_S", 30.0)
    planner = waiting()
    reported = report_later(planner.request_announced)
    assert idle_s(planner) < 5
    assert reported.is_set()
    for _ in range(3):
        planner.plan_step((), ())
        assert idle_s(planner) < 5


def test_idle_steps_are_long_again_after_the_announcement() -> None:
    planner = waiting()
    planner.request_announced()
    planner.plan_step((), ())
    time.sleep(ANNOUNCEMENT_S)
    assert idle_s(planner, 0.5) > 0.4


def test_an_idle_step_without_incoming_transfers_does_not_wait() -> None:
    assert idle_s(new_planner()[0]) < 5
