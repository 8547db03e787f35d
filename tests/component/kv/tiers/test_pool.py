"""A remote pool in a real Mooncake Store on this host, which is killed and frozen."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from headrace_common.errors import ConfigError
from headrace_common.tasks import BUGS
from headrace_kv.tiers.pool import RemotePool, pool_secret
from headrace_kv.tiers.pool_process import SEAL_BYTES, PoolMemory, PoolSetup, SharedArena, Slots
from headrace_kv.tiers.pool_server import StoreServer
from headrace_kv.transport.memory import PAGE_BYTES
from tests.pool_store import LONG_S, Store
from tests.waiting import until

SECRET = pool_secret(3)
# Longer than a call of a working store takes on a busy machine.
CALL_S = 30.0
MIB = 1 << 20


class Memory:
    """Slots of one rank, each full of one byte."""

    def __init__(self, slot_count: int = 8, content_bytes: int = 1_000) -> None:
        object_bytes = content_bytes + SEAL_BYTES
        slot_bytes = -(-object_bytes // PAGE_BYTES) * PAGE_BYTES
        self._arena = SharedArena(slot_bytes * slot_count)
        self.described = PoolMemory(self._arena.descriptor, slot_bytes, slot_count, object_bytes)
        self._slots = Slots(self.described)

    def fill(self, slot: int, value: int) -> None:
        content = self._slots.content_of(slot)
        content[:] = bytes([value]) * len(content)

    def value(self, slot: int) -> int:
        """Raises ValueError when the slot has several bytes."""
        (value,) = set(self._slots.content_of(slot))
        return value


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(tmp_path)
    try:
        await store.wait()
        yield store
    finally:
        store.end()


@contextmanager
def pool_of(address: str, memory: Memory) -> Iterator[RemotePool]:
    pool = RemotePool(PoolSetup(address, "127.0.0.1", SECRET.hex(), [memory.described]))
    try:
        yield pool
    finally:
        pool.close()


async def result(future: Future[list[bool]]) -> list[bool]:
    return await asyncio.wait_for(asyncio.wrap_future(future), LONG_S)


async def opened(pool: RemotePool) -> None:
    await until(lambda: pool.is_open, LONG_S)


def process_of(pool: RemotePool) -> int:
    return pool._process.pid


async def stored(pool: RemotePool, memory: Memory, key: str, slot: int, value: int) -> bool:
    memory.fill(slot, value)
    (done,) = await result(pool.put(0, [key], [slot], CALL_S))
    return done


async def test_blocks_of_one_worker_are_read_by_another(store: Store) -> None:
    ours, theirs = Memory(16, 3 * MIB // 2), Memory(16, 3 * MIB // 2)
    with pool_of(store.address, ours) as first, pool_of(store.address, theirs) as second:
        await opened(first)
        await opened(second)
        keys = [f"key-{number}" for number in range(16)]
        for slot in range(16):
            ours.fill(slot, slot + 1)
        assert all(await result(first.put(0, keys, list(range(16)), CALL_S)))
        assert await result(second.exists([*keys[:2], "none"], CALL_S)) == [True, True, False]
        slots = list(reversed(range(16)))
        assert all(await result(second.get(0, keys, slots, CALL_S)))
        assert [theirs.value(slot) for slot in slots] == list(range(1, 17))
        # Stored again, a block stays as it is.
        assert await stored(second, theirs, keys[0], 3, 99)
        assert await result(first.get(0, [keys[0]], [5], CALL_S)) == [True]
        assert ours.value(5) == 1


async def test_blocks_of_another_key_are_refused(store: Store) -> None:
    memory, other = Memory(), Memory()
    foreign = RemotePool(
        PoolSetup(store.address, "127.0.0.1", pool_secret(4).hex(), [other.described])
    )
    try:
        with pool_of(store.address, memory) as pool:
            await opened(pool)
            await opened(foreign)
            assert await stored(foreign, other, "a", 0, 7)
            assert await result(pool.get(0, ["a"], [0], CALL_S)) == [False]
            assert pool.is_open
            # It is removed, so that the right one can be stored.
            assert await stored(pool, memory, "a", 1, 8)
            assert await result(pool.get(0, ["a"], [2], CALL_S)) == [True]
            assert memory.value(2) == 8
    finally:
        foreign.close()


async def test_a_killed_store_ends_calls_and_is_found_again(store: Store, tmp_path: Path) -> None:
    address, memory = store.address, Memory()
    with pool_of(address, memory) as pool:
        await opened(pool)
        assert await stored(pool, memory, "a", 0, 7)
        store.signal(signal.SIGKILL)
        store.process.wait(LONG_S)
        assert await result(pool.get(0, ["a"], [1], CALL_S)) == [False]
        await until(lambda: not pool.is_open, LONG_S)
        again = Store(tmp_path, address)
        try:
            await again.wait()
            await opened(pool)
            assert await result(pool.exists(["a"], CALL_S)) == [False]
            assert await stored(pool, memory, "a", 0, 9)
            assert await result(pool.get(0, ["a"], [2], CALL_S)) == [True]
            assert memory.value(2) == 9
        finally:
            again.end()


async def test_a_frozen_store_ends_calls_in_time_and_nothing_lands_later(store: Store) -> None:
    memory = Memory()
    with pool_of(store.address, memory) as pool:
        await opened(pool)
        assert await stored(pool, memory, "a", 0, 7)
        memory.fill(1, 1)
        process = process_of(pool)
        store.freeze()
        begun_s = time.monotonic()
        assert await result(pool.get(0, ["a"], [1], 0.5)) == [False]
        assert time.monotonic() - begun_s < LONG_S / 2
        # The process that might still write has ended, and been waited for.
        assert not pool.is_open
        assert not psutil.pid_exists(process)
        refused = pool.get(0, ["a"], [1], CALL_S)
        assert refused.done()
        store.signal(signal.SIGCONT)
        await opened(pool)
        assert memory.value(1) == 1


async def test_a_killed_process_of_the_pool_is_replaced(store: Store) -> None:
    memory = Memory()
    with pool_of(store.address, memory) as pool:
        await opened(pool)
        assert await stored(pool, memory, "a", 0, 7)
        process = process_of(pool)
        os.kill(process, signal.SIGKILL)
        await until(lambda: pool.is_open and process_of(pool) != process, LONG_S)
        assert await result(pool.get(0, ["a"], [1], CALL_S)) == [True]
        assert memory.value(1) == 7


def connects(host: str, port: int) -> bool:
    """Whether a caller reaches a port. A filter drops its packets."""
    try:
        socket.create_connection((host, port), timeout=0.3).close()
    except OSError:
        return False
    return True


def test_a_pool_starts_again_after_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = SimpleQueue[int]()

    def start(pool: RemotePool, *ends: socket.socket) -> None:
        starts.put(1)
        raise ZeroDivisionError("as scripted")

    monkeypatch.setattr(RemotePool, "_start", start)
    with pool_of("127.0.0.1:1", Memory()):
        assert starts.get(timeout=LONG_S) + starts.get(timeout=LONG_S) == 2
    assert BUGS.pop("the remote pool")


async def test_no_port_of_the_store_or_a_client_serves_other_addresses(store: Store) -> None:
    memory = Memory()
    with pool_of(store.address, memory) as pool:
        await opened(pool)
        node, master = store.members()
        addresses = {
            row.laddr.ip for row in master.net_connections("tcp") if row.status == "LISTEN"
        }
        assert addresses == {"127.0.0.1"}
        # Mooncake's own listeners are on all addresses, and have a filter in the kernel.
        for process in (node, psutil.Process(process_of(pool))):
            ports = [
                row.laddr.port for row in process.net_connections("tcp") if row.status == "LISTEN"
            ]
            assert not [port for port in ports if connects("127.0.0.9", port)]


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.0.0.1:1", "localhost:0", "127.0.0.1"])
def test_the_store_refuses_addresses_that_other_hosts_reach(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"loopback only|host:port"):
        StoreServer(listen, 1.0)


def test_a_store_that_needs_more_memory_than_there_is_does_not_start() -> None:
    with pytest.raises(ConfigError, match="lower memory_gib"):
        StoreServer("127.0.0.1:0", float(1 << 30))
