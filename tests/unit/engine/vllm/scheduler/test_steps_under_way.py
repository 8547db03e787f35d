"""Whether an idle step may wait while vLLM has planned steps ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.connector.step_planner import SHORT_STEP_S, StepPlanner
from headrace_engine.connector.tier_planner import TierPlanner
from headrace_engine.connector.transfers import ReceiveParams
from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler, Peers
from headrace_kv.tiers.tiers import LowerTiers
from tests.unit.engine.connector.test_step_planner import ATTENTION, never


class WaitingPeers(Peers):
    idle_step_s = 1.0


class Scheduler(ConnectorScheduler):
    """One request waits for its KV."""

    def __init__(self, steps_max: int, waits: list[float], *, in_lockstep: bool = False) -> None:
        tiers = TierPlanner(LowerTiers({}), 1)
        super().__init__(ATTENTION, WaitingPeers(), tiers, steps_max, in_lockstep=in_lockstep)
        self._waits = waits
        params = ReceiveParams("x1")
        self._planner.blocks_allocated("r", params, (tuple(range(4)),), 100, 99, never)

    def arrive(self) -> None:
        self._planner.transfer_settled("x1", whole=True)

    def waits(self, tokens: int = 0) -> bool:
        """Plans a step. Whether it would wait for an event."""
        running = ["other"] if tokens else []
        cached = SimpleNamespace(
            req_ids=running,
            num_computed_tokens=[0 for _ in running],
            new_block_ids=[None for _ in running],
            resumed_req_ids=set(),
        )
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=tokens,
            num_scheduled_tokens=dict.fromkeys(running, tokens),
            scheduled_spec_decode_tokens={},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            preempted_req_ids=None,
        )
        self._waits.clear()
        self.build_connector_meta(output)
        return bool(self._waits)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of each wait, instead of the wait."""
    found: list[float] = []

    def wait_for_event(planner: StepPlanner, timeout_s: float) -> None:
        found.append(timeout_s)

    monkeypatch.setattr(StepPlanner, "wait_for_event", wait_for_event)
    return found


@pytest.mark.parametrize("steps_max", [1, 2, 3])
def test_an_idle_step_does_not_wait_while_a_step_before_it_computes(
    waits: list[float], steps_max: int
) -> None:
    scheduler = Scheduler(steps_max, waits)
    assert not scheduler.waits(tokens=1)
    # vLLM handles a step's results once it has planned as many steps as there are stages, or two.
    idle = [scheduler.waits() for _ in range(steps_max + 1)]
    assert idle == [*[False] * (steps_max - 1), True, True]


@pytest.mark.parametrize("steps_max", [1, 2])
def test_an_idle_step_does_not_wait_while_the_one_before_it_may_end_a_load(
    waits: list[float], steps_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(steps_max, waits)
    monkeypatch.setattr(TierPlanner, "is_loading", True)
    # Nothing is under way at first.
    assert [scheduler.waits() for _ in range(3)] == [True, *[steps_max == 1] * 2]


@pytest.mark.parametrize("steps_max", [1, 2])
@pytest.mark.parametrize("is_loading", [False, True])
def test_a_data_parallel_rank_does_not_wait(
    waits: list[float], steps_max: int, is_loading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks may have requests that run, and this rank's next step is also theirs."""
    scheduler = Scheduler(steps_max, waits, in_lockstep=True)
    monkeypatch.setattr(TierPlanner, "is_loading", is_loading)
    assert not any(scheduler.waits(tokens) for tokens in (0, 1, 0, 0, 0))


def test_an_idle_step_is_short_while_another_connector_loads(waits: list[float]) -> None:
    scheduler = Scheduler(1, waits)
    found = []
    for loads in (False, True, False):
        scheduler.set_loads_beside(loads)
        assert scheduler.waits()
        found += waits
    assert found == [1.0, SHORT_STEP_S, 1.0]


def test_a_request_that_reads_no_cache_finds_nothing_in_lower_tiers() -> None:
    scheduler = Scheduler(1, [])
    found: list[str] = []

    def find(request_id: str, computed_tokens: int, end_token: int) -> int:
        found.append(request_id)
        return 16

    scheduler._tiers.find = find  # type: ignore[method-assign]
    for skips, expected in ((True, (0, False)), (False, (16, True))):
        request: Any = SimpleNamespace(
            request_id=f"skips {skips}",
            kv_transfer_params=None,
            num_tokens=40,
            skip_reading_prefix_cache=skips,
        )
        assert scheduler.get_num_new_matched_tokens(request, 0) == expected
    assert found == ["skips False"]
