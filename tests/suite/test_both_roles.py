"""Workers of both roles as `headrace up --workers 2` starts them, and as an operator sees and drains one."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.suite.test_command_line import headrace, processes_in, up
from tests.waiting import until


@pytest.mark.core
async def test_up_with_workers_of_both_roles_answers_lists_and_drains_them(tmp_path: Path) -> None:
    port = free_port()
    router = ("--router", f"127.0.0.1:{port}")
    asked = ("chat", "Hello", *router, "--max-tokens", "5", "--temperature", "0")
    folder = tmp_path / "logs"
    async with up(folder, "--port", str(port), "--workers", "2") as process:
        answered = await headrace(*asked)
        assert answered.status == 0, answered.err
        assert answered.out.strip()
        # After one prompt, no worker has learned its times.
        assert "best other decision" not in (await headrace("trace", *router)).out
        explained = json.loads((await headrace("explain", "--json", *router)).out)
        assert [(one["other"], one["request_count"]) for one in explained["regrets"]] == [
            ("no estimate", 1)
        ]
        listed = await headrace("workers", *router)
        assert listed.status == 0, listed.err
        rows = [line.split()[:2] for line in listed.out.splitlines() if "worker-" in line]
        assert rows == [["worker-0", "both"], ["worker-1", "both"]]
        members = json.loads((await headrace("workers", "--json", *router)).out)["members"]
        roles = {one["worker_id"]: one["role"] for one in members}
        assert roles == {
            "router-0": "ROLE_ROUTER",
            "worker-0": "ROLE_BOTH",
            "worker-1": "ROLE_BOTH",
        }
        changed = await headrace("policy", "set", "tpot_target=0.05s", *router)
        assert changed.status == 0, changed.err
        assert "0.050s" in changed.out
        checked = await headrace("doctor", *router)
        assert "worker that generates" not in checked.out
        measured = await headrace("profile", "--output", str(tmp_path / "p.json"), *router)
        assert measured.status == 2
        assert "send at least 5 prompts" in measured.err

        unknown = await headrace("drain", "worker-7", *router)
        assert unknown.status == 1
        assert "worker-0, worker-1" in unknown.err
        gone = await headrace("drain", "worker-0", "--grace", "5", *router)
        assert gone.status == 0, gone.err
        assert "worker-0 drains: 0 requests in flight, up to 5 s" in gone.out
        assert "worker-0 has ended" in gone.out
        await until(lambda: not processes_in(folder, "worker-id=worker-0"), interval_s=0.05)
        again = await headrace(*asked)
        assert again.out == answered.out
        assert process.returncode is None
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 40) == 0
    assert processes_in(folder) == []
