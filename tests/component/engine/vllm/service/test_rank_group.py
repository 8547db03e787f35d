"""Data-parallel ranks that detect each other's end, over loopback."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace_common.errors import InternalError, WorkerGone
from headrace_engine.vllm.parallel import GroupPlace
from headrace_engine.vllm.service import rank_group
from headrace_engine.vllm.service.rank_group import RankGroup
from tests.ports import free_port
from tests.waiting import until

HOST = "127.0.0.1"
SOON_S = 5.0


@asynccontextmanager
async def joined(
    size: int, coordinator: int | None = None
) -> AsyncIterator[tuple[list[RankGroup], list[int]]]:
    """The ranks, and those that were lost to the others, in the order of the calls."""
    lost: list[int] = []
    port = free_port()

    def group(rank: int) -> RankGroup:
        place = GroupPlace(rank, size, HOST, port)
        return RankGroup(place, lambda: lost.append(rank), coordinator if rank == 0 else None)

    groups = [group(rank) for rank in range(size)]
    # Rank 0 comes last.
    await asyncio.gather(*(one.join(SOON_S) for one in reversed(groups)))
    try:
        yield groups, lost
    finally:
        await asyncio.gather(*(one.close() for one in groups))


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_the_end_of_a_rank_ends_all_others_once(victim: int) -> None:
    async with joined(3) as (groups, lost):
        others = sorted({0, 1, 2} - {victim})
        await groups[victim].close()
        await until(lambda: len(lost) == 2, SOON_S)
        for rank in others:
            loss = await groups[rank].loss()
            assert isinstance(loss, WorkerGone)
            expected = f"data-parallel rank {victim} has ended, and no rank can compute without it"
            assert loss.detail == expected
        assert sorted(lost) == others
        assert await groups[victim].loss() is None


async def test_without_a_lost_rank_an_engine_has_failed_by_itself() -> None:
    async with joined(2) as (groups, lost):
        start_s = time.monotonic()
        assert await groups[1].loss() is None
        assert time.monotonic() - start_s < rank_group.LOSS_LAG_S + 1
        assert lost == []


@pytest.mark.parametrize("last", [0, 1, 2])
async def test_ranks_stay_until_all_have_drained(last: int) -> None:
    async with joined(3) as (groups, lost):
        leaving = [
            asyncio.create_task(one.leave()) for rank, one in enumerate(groups) if rank != last
        ]
        done, _ = await asyncio.wait(leaving, timeout=0.2)
        assert not done
        await asyncio.wait_for(asyncio.gather(groups[last].leave(), *leaving), SOON_S)
        assert lost == []


@pytest.mark.parametrize("leaver", [0, 1])
async def test_a_rank_that_leaves_alone_waits_for_a_bounded_time(leaver: int) -> None:
    async with joined(2) as (groups, lost):
        await groups[leaver].leave(0.1)
        await until(lambda: lost == [1 - leaver], SOON_S)


async def test_a_rank_without_an_engine_waits_for_none() -> None:
    async with joined(2) as (groups, lost):
        await asyncio.wait_for(groups[0].leave(waits=False), 1.0)
        await until(lambda: lost == [1], SOON_S)


async def test_the_end_of_the_coordinator_ends_the_ranks() -> None:
    """Idle ranks are woken by it."""
    reading, writing = os.pipe()
    try:
        async with joined(2, reading) as (groups, lost):
            os.close(writing)
            await until(lambda: sorted(lost) == [0, 1], SOON_S)
            for group in groups:
                assert "vLLM's coordinator has ended" in str(await group.loss())
    finally:
        os.close(reading)


async def test_others_cannot_join() -> None:
    port = free_port()
    groups = [RankGroup(GroupPlace(rank, 2, HOST, port), lambda: None) for rank in range(2)]
    first = asyncio.create_task(groups[0].join(SOON_S))
    await asyncio.sleep(0)
    for hello in (b"2\n", b"0\n", b"x\n", b"", b"1" * 50_000 + b"\n"):
        await until(lambda: _listens(port), SOON_S)
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(hello)
        writer.write_eof()
        assert b"headrace" in await asyncio.wait_for(reader.read(), SOON_S)
        writer.close()
    await asyncio.gather(first, groups[1].join(SOON_S))
    # Nothing listens any more.
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(HOST, port)
    await asyncio.gather(*(one.close() for one in groups))


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize("rank", [0, 1])
async def test_ranks_that_do_not_come_are_named_with_the_port(rank: int) -> None:
    port = free_port()
    group = RankGroup(GroupPlace(rank, 2, HOST, port), lambda: None)
    with pytest.raises(InternalError, match=f"port {port} of {HOST} within 0.2 s"):
        await group.join(0.2)
