"""`headrace add` reaches the process of `headrace up`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace_cli.commands.up import add_worker
from headrace_cli.state import UpState, default_folder, locked, make_folder, write_state
from headrace_cli.up.keeping import AddRequests, Scaler
from headrace_cli.up.topology import Topology
from headrace_common.errors import ConfigError, WorkerGone
from headrace_planner.observation import WorkerCounts
from tests.unit.cli.up.fake_processes import FakeSupervisor

LIMIT_S = 20.0


async def test_headrace_add_gets_one_more_worker_or_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    bench = FakeSupervisor(tmp_path)
    scaler = Scaler(bench.supervisor, bench.spec, bench.console, lambda _: LIMIT_S, LIMIT_S)
    await scaler.apply(WorkerCounts(1, 1))
    folder = make_folder(default_folder(7050))
    shared = Topology(engine="sim", prefill_count=9)
    with locked(folder, "127.0.0.1:7050"):
        write_state(folder, UpState("127.0.0.1:7050", "127.0.0.1:7051", 1))
        adding = asyncio.create_task(AddRequests(folder, shared, scaler).run())
        added = await asyncio.to_thread(add_worker, "127.0.0.1:7050", "decode")
        assert added == "decode-1 serves on 127.0.0.1:1"
        assert scaler.counts() == WorkerCounts(1, 2)
        with pytest.raises(WorkerGone, match="workers of prefill share a process"):
            await asyncio.to_thread(add_worker, "127.0.0.1:7050", "prefill")
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
    with pytest.raises(WorkerGone, match="nothing serves on"):
        add_worker("127.0.0.1:7050", "decode")
    with pytest.raises(ConfigError, match="'dekode' is no role"):
        add_worker("127.0.0.1:7050", "dekode")
