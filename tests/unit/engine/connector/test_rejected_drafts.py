"""A block is stored once all its tokens are computed. A rejected draft has left wrong KV in the place of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.connector.tier_planner import TierPlanner
from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler, Peers
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.tiers import LowerTiers
from tests.unit.engine.connector.test_step_planner import ATTENTION

BLOCK = 4


class Scheduler(ConnectorScheduler):
    """One request "r", with a host tier. vLLM names a block once all its tokens are known."""

    def __init__(self) -> None:
        tiers = TierPlanner(LowerTiers({Tier.HOST: 8}), BLOCK)
        super().__init__(ATTENTION, Peers(), tiers)
        self._names: list[bytes] = []
        tiers.request_added("r", self._names)

    def know(self, token_count: int) -> None:
        """The request has so many tokens."""
        self._names += [
            number.to_bytes(8, "big") for number in range(len(self._names), token_count // BLOCK)
        ]

    def stored(
        self, computed_tokens: int, tokens: int, drafts: int = 0, blocks: tuple[int, ...] = ()
    ) -> list[int]:
        """Plans a step. The blocks that it stores."""
        cached = SimpleNamespace(
            req_ids=["r"],
            num_computed_tokens=[computed_tokens],
            new_block_ids=[(blocks,) if blocks else None],
            resumed_req_ids=set(),
        )
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=tokens + drafts,
            num_scheduled_tokens={"r": tokens + drafts},
            scheduled_spec_decode_tokens={"r": [-1] * drafts} if drafts else {},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            preempted_req_ids=None,
        )
        plan = self.build_connector_meta(output)
        return [block for one in plan.copies for block in one.copy.source_ids]


@pytest.fixture
def scheduler() -> Scheduler:
    """It has computed 5 tokens and 2 drafts after them, of which the second is rejected."""
    scheduler = Scheduler()
    scheduler.know(5)
    assert scheduler.stored(0, 5, blocks=(10, 11)) == []
    scheduler.know(6)
    assert scheduler.stored(5, 1, drafts=2) == [10]
    # An accepted draft, and the token after it, which is computed with the next step.
    scheduler.know(8)
    return scheduler


def test_a_block_with_a_rejected_draft_is_stored_when_its_last_token_is_computed(
    scheduler: Scheduler,
) -> None:
    assert scheduler.stored(7, 1, drafts=2) == []
    scheduler.know(9)
    assert scheduler.stored(8, 1, drafts=2) == [11]


def test_a_request_that_ends_after_a_rejected_draft_does_not_store_its_last_block(
    scheduler: Scheduler,
) -> None:
    scheduler.request_finished(SimpleNamespace(request_id="r", num_computed_tokens=7), ([],))
    assert scheduler.stored(0, 0) == []


def test_a_step_under_way_computes_the_last_token_that_is_known() -> None:
    """With steps planned ahead, vLLM counts drafts as computed before their results are known."""
    scheduler = Scheduler()
    scheduler.know(7)
    assert scheduler.stored(0, 7, blocks=(10, 11, 12)) == []
    assert scheduler.stored(7, 1, drafts=2) == [10]
    scheduler.know(8)
    assert scheduler.stored(10, 1, drafts=2) == [11]
    # Both drafts of the second step are rejected.
    scheduler.know(9)
    assert scheduler.stored(11, 1, drafts=2) == []
