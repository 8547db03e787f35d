"""Requests that compute a received block again, from the scheduler's hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.step_plan import BlockComparison
from headrace_engine.connector.transfers import ScheduledRequest
from headrace_engine.vllm.scheduler import comparisons
from headrace_engine.vllm.scheduler.comparisons import ComparisonPlanner
from headrace_engine.vllm.settings import COMPARISON_KEY
from headrace_kv.layout import TOKENS

BLOCK = 16
RECEIVED = 7
GROUP = LayerGroup(
    index=0,
    name="attention",
    kind=TOKENS,
    head_count=2,
    block_tokens=BLOCK,
    block_format="",
    layers=((0, "layer.0"),),
    page_bytes=1024,
)


class Rig:
    """A planner with one request for block 2 of a prompt, over blocks that a test chooses."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        cached: bool = True,
        received: int | None = RECEIVED,
    ) -> None:
        self.cached = cached
        self.block_ids = [3, 4, 9]
        self.dropped: list[str] = []
        monkeypatch.setattr(comparisons, "caches_block", self.caches_block)
        self.planner = ComparisonPlanner(GROUP, self.dropped.append)
        self.planner.bind(cast("Any", SimpleNamespace(get_block_ids=lambda _: (self.block_ids,))))
        for name, extra in (("plain", None), ("r", {COMPARISON_KEY: ["c1", received]})):
            self.planner.request_added(
                cast(
                    "Any",
                    SimpleNamespace(
                        request_id=name,
                        num_tokens=3 * BLOCK,
                        num_prompt_tokens=3 * BLOCK,
                        sampling_params=SimpleNamespace(extra_args=extra),
                    ),
                )
            )

    def caches_block(self, _manager: object, block_id: int, request: Any, number: int) -> bool:
        assert (block_id, request.request_id, number) == (RECEIVED, "r", 2)
        return self.cached

    def step(self, computed_tokens: int, step_tokens: int) -> list[BlockComparison]:
        scheduled = [
            ScheduledRequest(name, computed_tokens, step_tokens, (), False)
            for name in ("plain", "r")
        ]
        return self.planner.plan(scheduled)


def test_the_last_block_is_compared_in_the_step_that_completes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)
    assert rig.planner.may_run("r", 2 * BLOCK)
    assert rig.planner.may_run("plain", 0)
    assert rig.step(2 * BLOCK, 5) == []
    assert rig.step(2 * BLOCK, BLOCK) == [BlockComparison("c1", RECEIVED, 9)]
    assert rig.step(2 * BLOCK, BLOCK) == []
    assert rig.dropped == []


@pytest.mark.parametrize(("cached_tokens", "runs"), [(0, False), (BLOCK - 1, False), (BLOCK, True)])
def test_a_prefix_that_is_not_cached_is_not_computed(
    monkeypatch: pytest.MonkeyPatch, cached_tokens: int, runs: bool
) -> None:
    rig = Rig(monkeypatch)
    assert rig.planner.may_run("r", cached_tokens) is runs
    assert rig.dropped == ([] if runs else ["c1"])
    # The service aborts it. Until then vLLM asks again.
    assert rig.planner.may_run("r", cached_tokens) is runs
    rig.planner.request_finished("r")
    assert rig.planner.may_run("r", 0)


@pytest.mark.parametrize("why", ["evicted", "the same block", "in part"])
def test_a_block_that_cannot_be_compared_is_dropped(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    rig = Rig(monkeypatch, cached=why != "evicted")
    if why == "the same block":
        rig.block_ids[2] = RECEIVED
    before = 2 * BLOCK + (3 if why == "in part" else 0)
    assert rig.step(before, 3 * BLOCK - before) == []
    assert rig.dropped == ["c1"]


@pytest.mark.parametrize("found", [RECEIVED, None])
def test_without_a_block_any_cached_one_is_compared(
    monkeypatch: pytest.MonkeyPatch, found: int | None
) -> None:
    monkeypatch.setattr(comparisons, "cached_block", lambda *place: place[2:] == (2, 0) and found)
    rig = Rig(monkeypatch, received=None)
    assert rig.step(2 * BLOCK, BLOCK) == (
        [] if found is None else [BlockComparison("c1", RECEIVED, 9)]
    )
    assert rig.dropped == (["c1"] if found is None else [])


def test_a_request_that_ends_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.planner.request_finished("r")
    rig.planner.request_finished("never added")
    assert rig.step(2 * BLOCK, BLOCK) == []
    assert rig.dropped == []
