"""Changes of many members at a time reach a watcher in few messages, and a single one at once."""

from __future__ import annotations

import asyncio

from headrace.registry.v1 import registry_pb2
from headrace_registry.feed import ChangeFeed


async def test_members_that_join_together_come_together() -> None:
    feed = ChangeFeed(history_size=4_096)
    watch = feed.watch(0)
    await anext(watch)
    sizes: list[int] = []

    async def read() -> None:
        while True:
            sizes.append(len((await anext(watch)).changes))

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    for number in range(100):
        member = registry_pb2.Member(worker_id=f"d{number}", incarnation="a")
        feed.apply(feed.revision + 1, {member.worker_id: member})
        await asyncio.sleep(0)
        if number == 0:
            await asyncio.sleep(0)
            assert sizes == [1]
    async with asyncio.timeout(10):
        while sum(sizes) < 100:
            await asyncio.sleep(0.005)
    # One by one they would be 100.
    assert len(sizes) <= 20
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
