"""What requests fetch from a remote pool, and what is stored there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from headrace_engine.connector import pool_planner
from headrace_engine.connector.pool_planner import PoolUse
from headrace_engine.connector.step_plan import PoolMove, StepPlan
from headrace_engine.connector.tier_planner import BlockChange, TierPlanner
from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler, Peers
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.tiers import LowerTiers
from tests.unit.engine.connector.test_step_planner import ATTENTION
from tests.unit.engine.connector.test_tier_planner import BLOCK, hashes

LONG_S = 1e6


class Lookup:
    """A store that has the first blocks of every prompt, once the test lets it answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.answers: list[Future[int]] = []
        self.is_open = True

    def find(self, prefixes: Sequence[int], timeout_s: float) -> Future[int] | None:
        if not self.is_open:
            return None
        self.asked.append(tuple(prefixes))
        self.answers.append(Future())
        return self.answers[-1]


@pytest.fixture
def lookup() -> Lookup:
    return Lookup()


def planner(
    lookup: Lookup | None,
    host: int = 8,
    ranks: int = 1,
    *,
    publishes: bool = False,
    timeout_s: float = LONG_S,
) -> TierPlanner:
    use = PoolUse(ranks, publishes, timeout_s)
    tiers = TierPlanner(LowerTiers({Tier.HOST: host}), BLOCK, use)
    if lookup is not None:
        tiers.pool.attach(lookup)
    return tiers


def moves_of(tiers: TierPlanner) -> list[PoolMove]:
    plan = StepPlan()
    tiers.add_to(plan)
    return plan.moves


def computed(tiers: TierPlanner, request_id: str, names: list[bytes]) -> None:
    """A request that computes all its blocks in one step, and ends."""
    tiers.request_added(request_id, names)
    tiers.step_planned(request_id, 0, list(range(len(names))), replaces=True)
    tiers.request_finished(request_id, len(names) * BLOCK, sends=False)


def test_a_fetch_counts_what_every_rank_has(lookup: Lookup) -> None:
    tiers = planner(lookup, ranks=2)
    tiers.request_added("r", hashes(1, 2, 3))
    assert tiers.find("r", 0, 12) is None
    lookup.answers[0].set_result(3)
    assert tiers.find("r", 0, 12) is None
    (move,) = moves_of(tiers)
    tiers.pool.moves_ended([(move.number, 3)])
    assert tiers.find("r", 0, 12) is None
    tiers.pool.moves_ended([(move.number, 1)])
    assert tiers.find("r", 0, 12) == BLOCK


@pytest.mark.parametrize("found", [0, 2])
def test_a_request_runs_without_blocks_that_do_not_come(lookup: Lookup, found: int) -> None:
    tiers = planner(lookup)
    tiers.request_added("r", hashes(1, 2))
    assert tiers.find("r", 0, 8) is None
    lookup.answers[0].set_result(found)
    if found:
        assert tiers.find("r", 0, 8) is None
        tiers.pool.moves_ended([(move.number, 0) for move in moves_of(tiers)])
    assert tiers.find("r", 0, 8) == 0
    assert not tiers.is_loading


def test_without_a_store_no_request_waits(lookup: Lookup) -> None:
    tiers = planner(lookup)
    lookup.is_open = False
    tiers.request_added("r", hashes(1))
    assert tiers.find("r", 0, 4) == 0
    lookup.is_open = True
    # A later question of the same request asks the store.
    assert tiers.find("r", 0, 4) is None


def test_only_blocks_that_no_tier_has_are_fetched(lookup: Lookup) -> None:
    tiers = planner(lookup)
    computed(tiers, "a", hashes(1, 2))
    tiers.request_added("r", hashes(1, 2, 3))
    assert tiers.find("r", 0, 12) is None
    assert lookup.asked == [(3,)]
    tiers.request_added("s", hashes(1, 2))
    assert tiers.find("s", 0, 8) == 8


def test_stored_blocks_are_published_and_stay_meanwhile(lookup: Lookup) -> None:
    tiers = planner(lookup, host=2, publishes=True)
    computed(tiers, "a", hashes(1, 2))
    (move,) = moves_of(tiers)
    assert (move.fetches, move.prefixes) == (False, (1, 2))
    tiers.take_changes()
    # Both blocks are being read, so there is no room for another.
    computed(tiers, "b", hashes(3))
    assert moves_of(tiers) == []
    tiers.pool.moves_ended([(move.number, 1)])
    assert tiers.take_changes() == [BlockChange(Tier.REMOTE, True, hashes(1))]
    computed(tiers, "c", hashes(3))
    assert [one.prefixes for one in moves_of(tiers)] == [(3,)]


def test_a_published_block_that_is_computed_again_is_published_again(lookup: Lookup) -> None:
    tiers = planner(lookup, host=1, publishes=True)
    for name in (1, 2, 1):
        computed(tiers, f"r{name}", hashes(name))
        (move,) = moves_of(tiers)
        # The store may have evicted it as well.
        assert move.prefixes == (name,)
        tiers.pool.moves_ended([(move.number, 1)])


def test_only_the_blocks_that_were_stored_last_are_announced(
    lookup: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_planner, "ANNOUNCED_MAX", 1)
    tiers = planner(lookup, publishes=True)
    for name in (1, 2):
        computed(tiers, f"r{name}", hashes(name))
        tiers.take_changes()
        tiers.pool.moves_ended([(move.number, 1) for move in moves_of(tiers)])
    assert tiers.take_changes() == [
        BlockChange(Tier.REMOTE, True, hashes(2)),
        BlockChange(Tier.REMOTE, False, hashes(1)),
    ]


def test_an_engine_without_requests_makes_steps_for_moves_of_a_moment(
    lookup: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_planner, "IDLE_STEPS_S", LONG_S)
    tiers = planner(lookup, publishes=True)
    scheduler = ConnectorScheduler(ATTENTION, Peers(), tiers)
    pending = [scheduler.has_pending_push_work()]
    computed(tiers, "a", hashes(1))
    pending.append(scheduler.has_pending_push_work())
    scheduler.moves_ended([(move.number, 1) for move in moves_of(tiers)])
    pending.append(scheduler.has_pending_push_work())
    monkeypatch.setattr(pool_planner, "IDLE_STEPS_S", 0.0)
    computed(tiers, "b", hashes(2))
    pending.append(scheduler.has_pending_push_work())
    assert pending == [False, True, False, False]


def test_an_answer_after_the_time_of_its_request_moves_nothing(lookup: Lookup) -> None:
    tiers = planner(lookup, timeout_s=0.0)
    tiers.request_added("r", hashes(1))
    assert tiers.find("r", 0, 4) is None
    lookup.answers[0].set_result(1)
    assert tiers.find("r", 0, 4) == 0
    assert moves_of(tiers) == []


def test_only_workers_that_publish_store_blocks(lookup: Lookup) -> None:
    tiers = planner(lookup)
    computed(tiers, "a", hashes(1, 2))
    assert moves_of(tiers) == []


def test_a_lost_store_withdraws_what_it_had(lookup: Lookup) -> None:
    tiers = planner(lookup, publishes=True)
    computed(tiers, "a", hashes(1, 2))
    tiers.pool.moves_ended([(move.number, 2) for move in moves_of(tiers)])
    tiers.take_changes()
    tiers.pool.lost()
    assert tiers.take_changes() == []
    moves_of(tiers)
    assert tiers.take_changes() == [BlockChange(Tier.REMOTE, False, hashes(2, 1))]
