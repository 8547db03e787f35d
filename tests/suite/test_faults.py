"""Services restart, and workers drain. Every request ends in a correct answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace_cli.client import list_members
from tests.ports import free_port
from tests.suite.deployment import suite
from tests.suite.load import load
from tests.waiting import until

MEMBER_TTL_S = 3.0


async def test_no_request_fails_while_the_registry_is_away_and_comes_back(tmp_path: Path) -> None:
    # The worker restarts on its address, so the address must stay free in between.
    settings = (
        ("decode", "model", "sim:decode_step_s=0.02"),
        ("registry", "internal_listen", f"127.0.0.1:{free_port()}"),
        ("prefill", "member_ttl_s", str(MEMBER_TTL_S)),
        ("decode", "member_ttl_s", str(MEMBER_TTL_S)),
    )
    async with suite(tmp_path, prefill_count=2, settings=settings) as it:

        async def all_are_back() -> bool:
            names = {member.worker_id for member in await list_members(it.deployment.registry)}
            return {"router-0", "prefill-0", "prefill-1", "decode-0"} <= names

        async with load(it, streams=3) as answers:
            await answers.more(10)
            it.kill("registry")
            # Longer than a lease, which the registry counts by a real clock.
            await asyncio.sleep(MEMBER_TTL_S + 1)
            await answers.more(10)
            await it.restart("registry")
            await until(all_are_back, 15.0, interval_s=0.05)
            await asyncio.sleep(MEMBER_TTL_S)
            await answers.more(10)
        await it.wait_joined(2, 1)
        # A service that ends by itself leaves the registry at once.
        assert await it.terminate("router") == 0
        names = {member.worker_id for member in await list_members(it.deployment.registry)}
        assert names == {"prefill-0", "prefill-1", "decode-0"}
