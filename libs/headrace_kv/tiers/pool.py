"""The blocks of an engine in a pool: their keys, the scheduler's lookup, and the copies of each rank.

A block has an object for each shard of its heads in each pipeline stage. An object's name has the layout, the stage,
the heads, and a keyed hash of the block. The block's own hash covers its tokens, all tokens before it, and the tenant's
cache salt. So blocks of another model, layout or tenant have other names, and so have those of workers of another
tensor-parallel size. Without the deployment's key, a name does not show whether a prompt is in the pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeAlias

from headrace_common.tasks import repeat_after_bugs
from headrace_kv.layout import KvLayout, engine_hash
from headrace_kv.shard_map import shards
from headrace_kv.tiers.pool_process import (
    PACKET_BYTES_MAX,
    Operation,
    PoolCall,
    PoolMemory,
    PoolReply,
    PoolSetup,
    packet_of,
)
from headrace_kv.tiers.tiers import TierSettings
from headrace_kv.transport.guard import Networks
from headrace_kv.transport.mooncake import protocol_environment

_VERSION: Final = 2
"""Of the names, of the order of bytes in a block, and of the seal."""
_LAYOUT_CHARACTERS: Final = 16
_BLOCK_BYTES: Final = 16
_PREFIX_BYTES: Final = 32
# BLAKE2's personalization: no two digests of the deployment's key are equal.
_NAMES: Final = b"poolname"


def pool_secret(prefix_hash_key: int) -> bytes:
    """The key of names and seals, from the deployment's key."""
    return prefix_hash_key.to_bytes(8, "little")


class PoolKeys:
    """The names of the blocks of one layout."""

    def __init__(self, secret: bytes, layout: KvLayout) -> None:
        # Local broadcast changes no byte of a block.
        digest = engine_hash(replace(layout, broadcast_width=1)).hex()
        self._secret = secret
        self.layout = layout
        """The layout of the worker that uses the names."""
        self.shards = shards(layout.tensor_parallel_size, layout.kv_head_count)
        """The shards of each stage."""
        self.places = [
            f"headrace{_VERSION}-{digest[:_LAYOUT_CHARACTERS]}-{stage}.{heads.start}.{heads.stop}-"
            for stage in range(len(layout.stage_starts))
            for heads in (shard.heads for shard in self.shards)
        ]
        """The names of all objects of a block, before its key: shard by shard, of the first stage first."""

    def of_shard(self, stage: int, shard: int, prefixes: Sequence[int]) -> list[str]:
        """The names of the objects of blocks of one shard, by its number."""
        place = self.places[stage * len(self.shards) + shard]
        return [place + key for key in self.of_prefixes(prefixes)]

    def of_prefixes(self, prefixes: Sequence[int]) -> list[str]:
        """The keys of blocks, by their hashes of at most 256 bits."""
        return [
            hashlib.blake2s(
                prefix.to_bytes(_PREFIX_BYTES, "big"),
                digest_size=_BLOCK_BYTES,
                key=self._secret,
                person=_NAMES,
            ).hexdigest()
            for prefix in prefixes
        ]


class BlockLookup:
    """Looks up blocks on all ranks of a worker, which may be far from here. Any thread calls `on_found`."""

    def __init__(
        self, pool: RemotePool, keys: PoolKeys, on_found: Callable[[], None] = lambda: None
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._on_found = on_found

    def find(self, prefixes: Sequence[int], timeout_s: float) -> Future[int] | None:
        """How many first blocks every rank can fetch, which ends in time. None while the store cannot be asked."""
        if not self._pool.is_open or not prefixes:
            return None
        found: Future[int] = Future()
        asked = self._pool.exists(self._keys.of_prefixes(prefixes), timeout_s, self._keys.places)
        asked.add_done_callback(lambda ended: found.set_result(leading(ended.result())))
        found.add_done_callback(lambda _: self._on_found())
        return found


class RankBlocks:
    """Any thread may call it. `memory` is the number of the rank's memory in the pool."""

    def __init__(self, pool: RemotePool, keys: PoolKeys, rank: int, memory: int) -> None:
        self._pool = pool
        self._keys = keys
        self._memory = memory
        self._stage, rank_in_stage = divmod(rank, keys.layout.tensor_parallel_size)
        self._shard = max(
            number for number, one in enumerate(keys.shards) if one.first_rank <= rank_in_stage
        )
        shard = keys.shards[self._shard]
        self._copy, self._copies = rank_in_stage - shard.first_rank, shard.copies

    def fetch(
        self, prefixes: Sequence[int], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        """Reads blocks into slots. True for those that are whole."""
        names = self._keys.of_shard(self._stage, self._shard, prefixes)
        return self._pool.get(self._memory, names, slots, timeout_s)

    def store(
        self, prefixes: Sequence[int], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        """Stores blocks. Of the ranks with the same heads, one stores each block. The others have True at once."""
        done = [prefix % self._copies != self._copy for prefix in prefixes]
        chosen = [index for index, is_done in enumerate(done) if not is_done]
        stored: Future[list[bool]] = Future()
        if not chosen:
            stored.set_result(done)
            return stored
        names = self._keys.of_shard(self._stage, self._shard, [prefixes[i] for i in chosen])

        def end(moved: Future[list[bool]]) -> None:
            for index, whole in zip(chosen, moved.result(), strict=True):
                done[index] = whole
            stored.set_result(done)

        moved = self._pool.put(self._memory, names, [slots[i] for i in chosen], timeout_s)
        moved.add_done_callback(end)
        return stored


log = logging.getLogger(__name__)

BATCH_BLOCKS_MAX: Final = 1_024
"""Most blocks of one call."""
CALLS_MAX: Final = 64
"""Calls in flight. Further ones are refused."""
START_LIMIT_S: Final = 30.0
REST_FIRST_S: Final = 1.0
"""Pause before another process starts after one that was lost. Each further pause is twice as long."""
REST_MAX_S: Final = 30.0
_MODULE: Final = "headrace_kv.tiers.pool_process"
_BUFFER_BYTES: Final = 4 * PACKET_BYTES_MAX
_RPC_TIMEOUT_S: Final = 5.0


class RemotePool:
    """Blocks by key. The calls return at once, from any thread, and never raise.

    A future ends within its call's `timeout_s`. Its list has one value for each key: whether the block is there, or was
    moved whole. A store that is lost, frozen or wrong gives False, never an error. When a future has ended, the pool
    neither reads nor writes the call's slots any more. So blocks are lost with the store, and answers are not.

    A call that ends late ends the process, and with it everything that the call may still do. After that, and after
    every failure of the store, the pool is closed for a while. `on_lost` is called then, on the pool's thread, as are
    callbacks of futures.
    """

    def __init__(self, setup: PoolSetup, on_lost: Callable[[], None] = lambda: None) -> None:
        self._setup = setup
        self._on_lost = on_lost
        self._lock = threading.Lock()
        # To a process that can be called.
        self._channel: socket.socket | None = None
        # Futures that have not ended, with their number of keys.
        self._calls: dict[int, tuple[Future[list[bool]], int]] = {}
        self._next_id = 1
        self._loop = asyncio.SelectorEventLoop()
        self._task = self._loop.create_task(repeat_after_bugs(self._run, "the remote pool"))
        self._thread = threading.Thread(target=self._work, name="kv-pool", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the store can be asked at present. While it is False, every future ends at once, with False."""
        return self._channel is not None

    def exists(
        self, keys: Sequence[str], timeout_s: float, places: Sequence[str] = ("",)
    ) -> Future[list[bool]]:
        """Whether the store has blocks: of each, an object for every place, with the name place + key.

        They may be gone by the time of `get`. What follows a missing block may be reported as missing.
        """
        return self._begin("exists", keys, timeout_s, places=places)

    def get(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        """Reads blocks into slots of a memory. True for those with the bytes that were stored for exactly that key."""
        return self._begin("get", keys, timeout_s, memory=memory, slots=slots)

    def put(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        """Stores blocks. True also for those that the store has already."""
        return self._begin("put", keys, timeout_s, memory=memory, slots=slots)

    def close(self) -> None:
        """Ends all calls. Returns when no slot is in use any more."""
        if self._thread.is_alive():
            with suppress(RuntimeError):
                # Another thread closes the pool.
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()

    def _begin(
        self, operation: Operation, keys: Sequence[str], timeout_s: float, **more: Any
    ) -> Future[list[bool]]:
        with self._lock:
            if (
                self._channel is None
                or len(keys) > BATCH_BLOCKS_MAX
                or len(self._calls) >= CALLS_MAX
            ):
                return refused(len(keys))
            call = PoolCall(self._next_id, operation, keys, **more)
            try:
                self._channel.send(packet_of(call))
            except OSError:
                # The process reads too slowly.
                return refused(len(keys))
            self._next_id += 1
            future: Future[list[bool]] = Future()
            # A caller that gives up does not end what the process does.
            future.set_running_or_notify_cancel()
            self._calls[call.call_id] = future, len(keys)
            self._loop.call_soon_threadsafe(
                self._loop.call_later, timeout_s, self._end_late, call.call_id
            )
        return future

    def _work(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _run(self) -> None:
        rest_s = REST_FIRST_S
        while True:
            self._succeeded, self._late = False, ""
            reason = await self._serve()
            rest_s = REST_FIRST_S if self._succeeded else min(2 * rest_s, REST_MAX_S)
            log.warning(
                "the remote pool at %s is lost for %g s: %s", self._setup.master, rest_s, reason
            )
            await asyncio.sleep(rest_s)

    async def _serve(self) -> str:
        """Starts a process, serves calls until it is lost, and ends it. Returns the reason."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            try:
                with theirs:
                    self._process = self._start(ours, theirs)
            except OSError as error:
                return f"no process can be started: {error.strerror}"
            try:
                reason = await self._exchange(ours)
            except OSError:
                reason = "its process does not start"
            finally:
                with self._lock:
                    opened, self._channel = self._channel is not None, None
                    calls, self._calls = self._calls, {}
                # Then it uses no memory any more.
                self._process.kill()
                self._process.wait()
                for future, count in calls.values():
                    future.set_result([False] * count)
                if opened:
                    self._on_lost()
        return reason

    def _start(self, ours: socket.socket, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """Raises OSError when the node has no room for another process."""
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        descriptors = (theirs.fileno(), *(one.descriptor for one in self._setup.memories))
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=_environment(self._setup.protocol),
            pass_fds=descriptors,
        )

    async def _exchange(self, channel: socket.socket) -> str:
        """Returns the reason why the process is lost. Raises OSError when it does not begin to serve."""
        channel.setblocking(False)
        channel.send(packet_of(self._setup))
        async with asyncio.timeout(START_LIMIT_S):
            reply = await self._read(channel)
        if not reply.lost:
            with self._lock:
                self._channel = channel
        while not reply.lost:
            self._end(reply.call_id, reply.done)
            reply = await self._read(channel)
            self._succeeded |= not reply.lost
        return reply.lost

    async def _read(self, channel: socket.socket) -> PoolReply:
        with suppress(ConnectionError):
            if packet := await self._loop.sock_recv(channel, PACKET_BYTES_MAX):
                return PoolReply(*json.loads(packet))
        return PoolReply(0, lost=self._late or "its process has ended")

    def _end_late(self, call_id: int) -> None:
        if call_id in self._calls:
            self._late = "a call has not ended in time"
            self._process.kill()

    def _end(self, call_id: int, done: Sequence[bool]) -> None:
        with self._lock:
            future, _ = self._calls.pop(call_id, (None, 0))
        if future is not None:
            future.set_result(list(done))


def _environment(protocol: str) -> dict[str, str]:
    _, variables = protocol_environment(protocol)
    milliseconds = str(round(_RPC_TIMEOUT_S * 1_000))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("MC_FORCE_")},
        **variables,
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR"),
        "OMP_NUM_THREADS": "1",
    }


def leading(values: Sequence[bool]) -> int:
    """How many values before the first False."""
    return next((position for position, value in enumerate(values) if not value), len(values))


def refused(count: int) -> Future[list[bool]]:
    """The ended future of a call without success."""
    future: Future[list[bool]] = Future()
    future.set_result([False] * count)
    return future


PoolOpener: TypeAlias = Callable[[Sequence[PoolMemory], bytes, Callable[[], None]], RemotePool]
"""Opens a pool over the memories of all ranks of a process, with the pool's secret, and a callback for its losses."""


def pool_opener(
    settings: TierSettings,
    address: str,
    rdma_devices: Sequence[str] = (),
    admitted: Networks | None = None,
) -> PoolOpener:
    """Opens the store at `settings.pool_address`. `address` is this worker's."""

    def open_pool(
        memories: Sequence[PoolMemory], secret: bytes, on_lost: Callable[[], None]
    ) -> RemotePool:
        protocol, _ = protocol_environment("auto")
        callers: Sequence[str] | None = ()
        if protocol == "rdma":
            # Peers connect back, unlike over TCP.
            callers = None if admitted is None else list(map(str, admitted))
        setup = PoolSetup(
            master=settings.pool_address,
            address=address,
            secret=secret.hex(),
            memories=memories,
            protocol=protocol,
            rdma_devices=",".join(rdma_devices),
            admitted=callers,
        )
        return RemotePool(setup, on_lost)

    return open_pool
