"""Steps that vLLM makes without requests. Starts no engine."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_engine.vllm.step_plan import StepPlan
from headrace_engine.vllm.tiers import pool_planner
from tests.unit.engine.vllm.scheduler.test_step_planner import ATTENTION
from tests.unit.engine.vllm.tiers.test_pool_planner import LONG_S, Lookup, computed, hashes, planner
from tests.vllm.conftest import IMPORTS_VLLM

pytestmark = IMPORTS_VLLM


def test_an_engine_makes_steps_until_ranks_have_moved_its_blocks_to_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler

    class Scheduler(ConnectorScheduler):
        def on_new_request(self, request: Any) -> None: ...

        def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            return False, None

        def shutdown(self) -> None: ...

    monkeypatch.setattr(pool_planner, "IDLE_STEPS_S", LONG_S)
    tiers = planner(Lookup(), publishes=True)
    scheduler = Scheduler(ATTENTION, lambda _: None, 0.0, tiers)
    pending = [scheduler.has_pending_push_work()]
    computed(tiers, "a", hashes(1))
    pending.append(scheduler.has_pending_push_work())
    plan = StepPlan()
    tiers.add_to(plan)
    scheduler.moves_ended((move.number, 1) for move in plan.moves)
    pending.append(scheduler.has_pending_push_work())
    assert pending == [False, True, False]
