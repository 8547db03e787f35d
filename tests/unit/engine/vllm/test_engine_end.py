"""A vLLM engine that ends by itself, or because another data-parallel rank has ended."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from headrace_common.errors import HeadraceError, InternalError, WorkerGone
from headrace_engine.config import EngineConfig
from headrace_engine.vllm.engine import VllmEngine
from headrace_kv.layout import WorkerRef


class Group:
    """A RankGroup with this loss."""

    def __init__(self, loss: HeadraceError | None) -> None:
        self._loss = loss
        self.waited: list[bool] = []

    async def loss(self) -> HeadraceError | None:
        return self._loss

    async def leave(self, *, waits: bool) -> None:
        self.waited.append(waits)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def engine_of(group: Group | None) -> VllmEngine:
    config = EngineConfig("vllm", "models/none", "decode", WorkerRef("d", "1"))
    no_descriptors: Any = None
    engine = VllmEngine(config, no_descriptors)
    engine._group = group  # type: ignore[assignment]
    return engine


@pytest.mark.parametrize("in_group", [False, True])
async def test_the_worker_ends_with_the_error_of_its_engine(
    signals: list[tuple[int, int]], in_group: bool
) -> None:
    group = Group(None) if in_group else None
    engine = engine_of(group)
    engine._engine_lost("it was killed")
    assert signals == [(os.getpid(), signal.SIGTERM)]
    with pytest.raises(InternalError, match="it was killed"):
        await engine.close()
    assert group is None or group.waited == [False]


async def test_the_end_of_another_rank_is_no_bug_of_this_one(
    signals: list[tuple[int, int]],
) -> None:
    engine = engine_of(Group(WorkerGone("data-parallel rank 1 has ended")))
    engine._engine_lost("the collective failed")
    # Requests can be tried elsewhere.
    with pytest.raises(WorkerGone, match="rank 1"):
        await engine._raise_loss(InternalError("vLLM failed"))
    with pytest.raises(WorkerGone, match="rank 1"):
        await engine.close()


async def test_a_rank_that_stops_waits_for_the_others() -> None:
    group = Group(None)
    engine = engine_of(group)
    await engine.close()
    assert group.waited == [True]
