"""A host with ranks of another host's engine, with ranks that a thread stands for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from headrace_common.errors import WorkerGone
from headrace_engine.config import EngineConfig
from headrace_engine.vllm import node
from headrace_kv.layout import WorkerRef
from tests.waiting import let_a_wrong_step_show, until

CONFIG = EngineConfig("vllm", "models/m", "decode", WorkerRef("d0", ""))


class Ranks:
    """Run until `ended` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended, self.waiting, self.shut_down = threading.Event(), threading.Event(), False
        monkeypatch.setattr(node, "check_config", lambda _: None)
        monkeypatch.setattr(node, "launch_ranks", lambda *_: self)
        monkeypatch.setattr(node, "wait_for_end", self.wait_for_end)

    def wait_for_end(self, _: Any) -> None:
        self.waiting.set()
        self.ended.wait()

    def shutdown(self) -> None:
        self.shut_down = True
        self.ended.set()

    async def run(self, drain_grace_s: float) -> asyncio.Task[None]:
        running = asyncio.create_task(node.run_ranks(CONFIG, drain_grace_s))
        await until(self.waiting.is_set)
        return running


async def test_the_end_of_the_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    running = await ranks.run(60.0)
    ranks.ended.set()
    with pytest.raises(WorkerGone, match="the host with node_rank 0 has ended"):
        await running
    assert ranks.shut_down


async def test_after_a_signal_ranks_end_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    running = await ranks.run(60.0)
    running.cancel()
    await let_a_wrong_step_show()
    assert not running.done()
    assert not ranks.shut_down
    ranks.ended.set()
    await running


async def test_after_a_signal_ranks_end_at_the_latest_after_the_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch)
    running = await ranks.run(0.05)
    running.cancel()
    await running
    assert ranks.shut_down
