"""An aborted request frees all its blocks, in every state."""

from __future__ import annotations

import pytest

from headrace_engine.vllm.link.messages import EngineLoad
from tests.vllm.aborts import BLOCK_COUNT, STATES
from tests.vllm.conftest import RunJob
from tests.vllm.pair import STEPS_AHEAD

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


@pytest.mark.parametrize(("stages", "engine_args"), [(1, ""), (2, ""), (1, STEPS_AHEAD)])
def test_aborts_in_every_state_free_all_blocks(
    run_job: RunJob, stages: int, engine_args: str
) -> None:
    result = run_job(
        "tests.vllm.aborts:measure", model="tiny-llama", stages=stages, engine_args=engine_args
    )
    start = EngineLoad(**result["start"])
    assert start == EngineLoad(0, 0, 0, BLOCK_COUNT - 1)
    seen: dict[str, EngineLoad] = {}
    for role, states in STATES.items():
        left_out = {"preempted"} if role == "prefill" and (stages > 1 or engine_args) else set()
        assert result[role].keys() == states.keys() - left_out
        for state, outcome in result[role].items():
            assert EngineLoad(**outcome["after"]) == start, (role, state)
            seen[f"{role} {state}"] = EngineLoad(**outcome["seen"])
    # Each request was in the state that its name says.
    assert (seen["decode waiting"].running_requests, seen["decode waiting"].waiting_requests) == (
        1,
        1,
    )
    assert seen["decode remote"] == EngineLoad(0, 1, 10, BLOCK_COUNT - 1)
    assert seen["decode running"].running_requests == 1
    assert seen["decode preempted"].running_requests == 1
    assert seen["decode preempted"].waiting_requests == 1
    assert seen["prefill waiting"] == EngineLoad(0, 1, 16, BLOCK_COUNT - 1)
    assert seen["prefill running"].running_requests == 1
    if stages == 1 and not engine_args:
        assert seen["prefill preempted"].running_requests == 1
    assert seen["prefill sending"] == EngineLoad(0, 0, 16, BLOCK_COUNT - 1)
