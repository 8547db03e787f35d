"""Peers that send nothing, and their own late timers."""

from __future__ import annotations

import asyncio

from headrace_common.tasks import wait_silent
from tests.virtually import stand_still

LIMIT_S = 6.0


class Peer:
    def __init__(self) -> None:
        self.since_s: float | None = None
        self.found_s: float | None = None

    def sent(self) -> None:
        self.since_s = asyncio.get_running_loop().time()

    async def find(self) -> None:
        await wait_silent(lambda: self.since_s, LIMIT_S)
        self.found_s = asyncio.get_running_loop().time()


async def test_silence_counts_from_the_latest_message() -> None:
    peer = Peer()
    finding = asyncio.create_task(peer.find())
    await asyncio.sleep(100.0)
    for _ in range(10):
        peer.sent()
        await asyncio.sleep(LIMIT_S - 0.1)
        assert peer.found_s is None
    await finding
    assert peer.since_s is not None
    assert peer.found_s == peer.since_s + LIMIT_S


async def test_a_peer_is_not_silent_because_this_process_stood_still() -> None:
    peer = Peer()
    finding = asyncio.create_task(peer.find())
    peer.sent()
    await asyncio.sleep(1.0)
    stand_still(60.0)
    await asyncio.sleep(0.5)
    assert peer.found_s is None
    # The messages that waited are read now.
    peer.sent()
    await asyncio.sleep(LIMIT_S - 1.0)
    assert peer.found_s is None
    await finding
