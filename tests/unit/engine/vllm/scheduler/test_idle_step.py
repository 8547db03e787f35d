"""How long a step waits when vLLM has nothing to compute."""

from __future__ import annotations

import threading
import time

import pytest

from headrace_engine.vllm.scheduler.step_planner import ANNOUNCEMENT_S, StepPlanner
from headrace_engine.vllm.settings import receive_params
from headrace_engine.vllm.step.groups import LayerGroup
from headrace_kv.layout.layout import TOKENS

GROUP = LayerGroup(0, "attention", TOKENS, 4, 32, "plain", ((0, "layer"),))


def waiting() -> StepPlanner:
    """A planner with one request that waits for its KV and its first token."""
    planner = StepPlanner((GROUP,), lambda reservation: None)
    params = receive_params("x1", awaits_first_token=True)
    planner.blocks_allocated("r", params, [range(4)], 100, 100, lambda token_id: None)
    return planner


@pytest.mark.parametrize("event", ["arrived", "released", "first token"])
def test_an_idle_step_ends_with_an_event_of_a_transfer(event: str) -> None:
    planner = waiting()
    reports = {
        "arrived": lambda: planner.transfer_settled("x1", whole=True),
        "released": lambda: planner.transfer_settled("x1", whole=False),
        "first token": lambda: planner.first_token_received("x1", 7),
    }
    timer = threading.Timer(0.05, reports[event])
    start_s = time.monotonic()
    timer.start()
    planner.wait_for_event(10)
    assert 0.04 < time.monotonic() - start_s < 5
    timer.join()
    # The event stays until a step has planned it.
    planner.wait_for_event(10)
    planner.plan_step((), ())
    start_s = time.monotonic()
    planner.wait_for_event(0.5)
    # After a failed transfer there is none to wait for.
    assert (time.monotonic() - start_s < 0.4) == (event == "released")


def test_idle_steps_are_short_while_a_request_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than any machine pauses.
    monkeypatch.setattr("headrace_engine.vllm.scheduler.step_planner.ANNOUNCEMENT_S", 30.0)
    planner = waiting()
    timer = threading.Timer(0.05, planner.request_announced)
    start_s = time.monotonic()
    timer.start()
    planner.wait_for_event(10)
    timer.join()
    for _ in range(3):
        planner.plan_step((), ())
        planner.wait_for_event(10)
    assert 0.04 < time.monotonic() - start_s < 5


def test_idle_steps_are_long_again_after_the_announcement() -> None:
    planner = waiting()
    planner.request_announced()
    planner.plan_step((), ())
    time.sleep(ANNOUNCEMENT_S)
    start_s = time.monotonic()
    planner.wait_for_event(0.5)
    assert time.monotonic() - start_s > 0.4


def test_an_idle_step_without_incoming_transfers_does_not_wait() -> None:
    planner = StepPlanner((GROUP,), lambda reservation: None)
    start_s = time.monotonic()
    planner.wait_for_event(10)
    assert time.monotonic() - start_s < 5
