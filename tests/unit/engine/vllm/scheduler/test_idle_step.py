"""The scheduler's side, while vLLM has nothing to compute."""

from __future__ import annotations

import threading
import time

import pytest

from headrace_engine.vllm.scheduler.connector_scheduler import ON_ITS_WAY_S, ConnectorScheduler
from headrace_engine.vllm.settings import incoming_params
from headrace_engine.vllm.step.groups import LayerGroup
from headrace_kv.layout.layout import TOKENS

GROUP = LayerGroup(0, "attention", TOKENS, 4, 32, "plain", ((0, "layer"),))


def waiting() -> ConnectorScheduler:
    """With one request that waits for its KV and its first token."""
    scheduler = ConnectorScheduler((GROUP,), lambda reservation: None)
    params = incoming_params("x1", awaits_first_token=True)
    scheduler.allocated("r", params, [range(4)], 100, 100, lambda token_id: None)
    return scheduler


@pytest.mark.parametrize("news", ["arrived", "released", "first token"])
def test_an_idle_step_ends_with_what_its_requests_wait_for(news: str) -> None:
    scheduler = waiting()
    tells = {
        "arrived": lambda: scheduler.settle("x1", whole=True),
        "released": lambda: scheduler.settle("x1", whole=False),
        "first token": lambda: scheduler.first_token("x1", 7),
    }
    teller = threading.Timer(0.05, tells[news])
    start_s = time.monotonic()
    teller.start()
    scheduler.wait_for_news(10)
    assert 0.04 < time.monotonic() - start_s < 5
    teller.join()
    # It is news until a step has taken it.
    scheduler.wait_for_news(10)
    scheduler.plan_step((), ())
    start_s = time.monotonic()
    scheduler.wait_for_news(1.5)
    # A transfer that failed leaves nothing to wait for.
    assert (time.monotonic() - start_s < 1.4) == (news == "released")


def test_an_idle_step_lets_a_new_request_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # No machine stands still for so long.
    monkeypatch.setattr("headrace_engine.vllm.scheduler.connector_scheduler.ON_ITS_WAY_S", 30.0)
    scheduler = waiting()
    teller = threading.Timer(0.05, scheduler.request_coming)
    start_s = time.monotonic()
    teller.start()
    scheduler.wait_for_news(10)
    teller.join()
    # As long as it is on its way, steps are short.
    for _ in range(3):
        scheduler.plan_step((), ())
        scheduler.wait_for_news(10)
    assert 0.04 < time.monotonic() - start_s < 5


def test_idle_steps_are_long_again_once_it_should_be_there() -> None:
    scheduler = waiting()
    scheduler.request_coming()
    scheduler.plan_step((), ())
    time.sleep(ON_ITS_WAY_S)
    start_s = time.monotonic()
    scheduler.wait_for_news(0.5)
    assert time.monotonic() - start_s > 0.4


def test_an_idle_step_without_incoming_transfers_does_not_wait() -> None:
    scheduler = ConnectorScheduler((GROUP,), lambda reservation: None)
    start_s = time.monotonic()
    scheduler.wait_for_news(10)
    assert time.monotonic() - start_s < 5
