"""Times from a profile."""

from __future__ import annotations

import pytest

from headrace_planner.settings import DecodePoint
from headrace_simulator.cost import CostModel
from tests.unit.simulator.samples import PROFILE, SLOW_LINK


def test_a_cached_part_is_not_computed() -> None:
    cost = CostModel(PROFILE)
    assert cost.prefill_s(4000, 0) == pytest.approx(PROFILE.ttft_s(4000) - 0.02)
    assert cost.prefill_s(4000, 3000) == pytest.approx(PROFILE.ttft_s(1000), rel=0.01)


def test_a_transfer_is_exposed_only_beyond_the_computing() -> None:
    cost = CostModel(SLOW_LINK)
    assert cost.exposed_transfer_s(0, 1.0) == 0.0
    assert cost.exposed_transfer_s(1000, 5.0) == pytest.approx(0.5)
    assert cost.exposed_transfer_s(1000, 1.5) == pytest.approx(1.0)


def test_a_step_gets_longer_with_the_requests_and_their_context() -> None:
    cost = CostModel(PROFILE)
    assert cost.step_s(1, 1000) == pytest.approx(0.02)
    assert cost.step_s(6, 1000) == pytest.approx(0.03)
    assert cost.step_s(26, 1000) == pytest.approx(0.07)
    longer = DecodePoint(kv_usage=0.1, context_tokens=3000, itl_s=0.06, tokens_per_s=1 / 0.06)
    both = CostModel(PROFILE.model_copy(update={"decode": (longer, *PROFILE.decode)}))
    assert both.step_s(1, 2000) == pytest.approx(0.04)
    assert both.step_s(1, 500) == pytest.approx(0.02)
    assert both.step_s(1, 9000) == pytest.approx(0.06)
