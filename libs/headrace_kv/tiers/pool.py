"""The blocks of an engine in a pool: their keys, the scheduler's lookup, and the copies of each rank.

A block has an object for each shard of its heads in each pipeline stage. An object's name has the layout, the stage,
the heads, and a keyed hash of the block. The block's own hash covers its tokens, all tokens before it, and the tenant's
cache salt. So blocks of another model, layout or tenant have other names, and so have those of workers of another
tensor-parallel size. Without the deployment's key, a name does not show whether a prompt is in the pool.
"""

from __future__ import annotations

import hashlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from headrace_kv.layout import KvLayout, layout_to_proto
from headrace_kv.shard_map import Shard, shards
from headrace_kv.tiers.pool_process import (
    PACKET_BYTES_MAX,
    Operation,
    PoolCall,
    PoolMemory,
    PoolReply,
    PoolSetup,
    call_to_packet,
    reply_from_packet,
    setup_to_packet,
)
from headrace_kv.tiers.tiers import TierSettings
from headrace_kv.transport.mooncake.transport import protocol_environment
from headrace_kv.transport.networks import Networks

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
        message = layout_to_proto(replace(layout, broadcast_width=1))
        digest = hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
        self._layout = digest[:_LAYOUT_CHARACTERS]
        self._secret = secret
        self.layout = layout
        """The layout of the worker that uses the names."""
        self.shards = shards(layout.tensor_parallel_size, layout.kv_head_count)
        """The shards of each stage."""
        self.objects_per_block = len(layout.stage_starts) * len(self.shards)

    def of_shard(self, stage: int, shard: Shard, prefixes: Sequence[int]) -> list[str]:
        """The names of one shard of blocks, by their hashes of at most 256 bits."""
        return self._join(stage, shard, self._digests(prefixes))

    def of_blocks(self, prefixes: Sequence[int]) -> list[str]:
        """The names of all objects of blocks, shard by shard."""
        digests = self._digests(prefixes)
        return [
            name
            for stage in range(len(self.layout.stage_starts))
            for shard in self.shards
            for name in self._join(stage, shard, digests)
        ]

    def _join(self, stage: int, shard: Shard, digests: list[str]) -> list[str]:
        place = f"{stage}.{shard.heads.start}.{shard.heads.stop}"
        return [f"headrace{_VERSION}-{self._layout}-{place}-{digest}" for digest in digests]

    def _digests(self, prefixes: Sequence[int]) -> list[str]:
        return [
            hashlib.blake2s(
                prefix.to_bytes(_PREFIX_BYTES, "big"),
                digest_size=_BLOCK_BYTES,
                key=self._secret,
                person=_NAMES,
            ).hexdigest()
            for prefix in prefixes
        ]


_QUERIES_MAX: Final = 6


class BlockLookup:
    """Looks up blocks on all ranks of a worker, which may be far from here."""

    def __init__(self, pool: RemotePool, keys: PoolKeys) -> None:
        self._pool = pool
        self._keys = keys

    def find(self, prefixes: Sequence[int], timeout_s: float) -> Future[int] | None:
        """How many first blocks every rank can fetch, which ends in time. None while the store cannot be asked."""
        if not self._pool.is_open or not prefixes:
            return None
        search = _Search(self._pool, self._keys, prefixes, time.monotonic() + timeout_s)
        search.ask()
        return search.found


class _Search:
    """One lookup. Its queries follow each other, on the threads that end them."""

    def __init__(
        self, pool: RemotePool, keys: PoolKeys, prefixes: Sequence[int], due_s: float
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._prefixes = prefixes
        self._due_s = due_s
        self._queries = 0
        self._count = 0
        self.found: Future[int] = Future()

    def ask(self) -> None:
        """Asks for as many further blocks as a query holds."""
        left_s = self._due_s - time.monotonic()
        rest = self._prefixes[self._count :]
        if not rest or self._queries >= _QUERIES_MAX or left_s <= 0:
            self.found.set_result(self._count)
            return
        self._queries += 1
        asked = rest[: max(1, BATCH_BLOCKS_MAX // self._keys.objects_per_block)]
        answer = self._pool.exists(self._keys.of_blocks(asked), left_s)
        answer.add_done_callback(partial(self._answered, len(asked)))

    def _answered(self, asked: int, answer: Future[list[bool]]) -> None:
        present = answer.result()
        whole = min(
            leading(present[start : start + asked]) for start in range(0, len(present), asked)
        )
        self._count += whole
        if whole == asked:
            self.ask()
        else:
            self.found.set_result(self._count)


class RankBlocks:
    """Any thread may call it. `memory` is the number of the rank's memory in the pool."""

    def __init__(self, pool: RemotePool, keys: PoolKeys, rank: int, memory: int) -> None:
        self._pool = pool
        self._keys = keys
        self._memory = memory
        self._stage, rank_in_stage = divmod(rank, keys.layout.tensor_parallel_size)
        self._shard = next(one for one in reversed(keys.shards) if one.first_rank <= rank_in_stage)
        self._copy = rank_in_stage - self._shard.first_rank

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
        done = [prefix % self._shard.copies != self._copy for prefix in prefixes]
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


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that the process has not ended."""

    future: Future[list[bool]]
    count: int
    due_s: float

    def end(self, done: Sequence[bool] = ()) -> None:
        """Without `done`, no block was moved."""
        self.future.set_result(list(done) or [False] * self.count)


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
        self._child: _Child | None = None
        self._calls: dict[int, _Call] = {}
        self._next_id = 1
        self._succeeded = False
        self._closing = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-pool", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the store can be asked at present. While it is False, every future ends at once, with False."""
        return self._child is not None

    @property
    def process_id(self) -> int:
        """The id of the process; 0 while there is none. For tests."""
        child = self._child
        return 0 if child is None else child.process_id

    def exists(self, keys: Sequence[str], timeout_s: float) -> Future[list[bool]]:
        """Whether the store has blocks. They may be gone by the time of `get`."""
        return self._begin("exists", keys, timeout_s)

    def get(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        """Reads blocks into slots of a memory. True for those with the bytes that were stored for exactly that key."""
        return self._begin("get", keys, timeout_s, memory, slots)

    def put(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        """Stores blocks. True also for those that the store has already."""
        return self._begin("put", keys, timeout_s, memory, slots)

    def close(self) -> None:
        """Ends all calls. Returns when no slot is in use any more."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _begin(
        self,
        operation: Operation,
        keys: Sequence[str],
        timeout_s: float,
        memory: int = 0,
        slots: Sequence[int] = (),
    ) -> Future[list[bool]]:
        if len(keys) > BATCH_BLOCKS_MAX:
            return refused(len(keys))
        with self._lock:
            if self._child is None or self._closing.is_set() or len(self._calls) >= CALLS_MAX:
                return refused(len(keys))
            call = PoolCall(self._next_id, operation, tuple(keys), memory, tuple(slots))
            if not self._child.send(call):
                return refused(len(keys))
            future: Future[list[bool]] = Future()
            # A caller that gives up does not end what the process does.
            future.set_running_or_notify_cancel()
            self._calls[self._next_id] = _Call(future, len(keys), time.monotonic() + timeout_s)
            self._next_id += 1
            # The thread learns of the deadline.
            self._wake()
        return future

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b".")
        except BlockingIOError:
            # It is awake anyway.
            return

    def _run(self) -> None:
        rest_s = REST_FIRST_S
        while not self._closing.is_set():
            self._succeeded = False
            reason = self._serve()
            if self._closing.is_set():
                return
            rest_s = REST_FIRST_S if self._succeeded else min(2 * rest_s, REST_MAX_S)
            log.warning(
                "the remote pool at %s is lost for %g s: %s", self._setup.master, rest_s, reason
            )
            self._closing.wait(rest_s)

    def _serve(self) -> str:
        """Starts a process, serves calls until it is lost or the pool is closed, and ends it. Returns the reason."""
        try:
            child = _Child(self._setup)
        except OSError as error:
            return f"no process can be started: {error.strerror}"
        opened = False
        try:
            reason = self._wait_ready(child)
            if not reason:
                opened = True
                with self._lock:
                    self._child = child
                reason = self._serve_calls(child)
        finally:
            with self._lock:
                self._child = None
                calls, self._calls = self._calls, {}
            child.kill()
            for call in calls.values():
                call.end()
        if opened and not self._closing.is_set():
            self._on_lost()
        return reason

    def _wait_ready(self, child: _Child) -> str:
        """Returns the reason when the process does not begin to serve."""
        due_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < due_s and not self._closing.is_set():
            self._wait(child, due_s)
            try:
                reply = child.read()
            except EOFError:
                return "its process has ended at the start"
            if reply is not None:
                return reply.lost
        return "its process does not start"

    def _serve_calls(self, child: _Child) -> str:
        while not self._closing.is_set():
            self._wait(child, self._first_due_s())
            try:
                while (reply := child.read()) is not None:
                    if reply.lost:
                        return reply.lost
                    self._end(reply)
            except EOFError:
                return "its process has ended"
            if self._first_due_s() <= time.monotonic():
                return "a call has not ended in time"
        return ""

    def _wait(self, child: _Child, due_s: float) -> None:
        """Returns when the process has sent something, at a deadline, or when woken."""
        timeout_s = max(0.0, min(due_s - time.monotonic(), REST_MAX_S))
        poller = select.poll()
        poller.register(child, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        ready = poller.poll(timeout_s * 1_000)
        if any(descriptor == self._wake_read for descriptor, _ in ready):
            os.read(self._wake_read, 4_096)

    def _first_due_s(self) -> float:
        with self._lock:
            return min((call.due_s for call in self._calls.values()), default=float("inf"))

    def _end(self, reply: PoolReply) -> None:
        with self._lock:
            call = self._calls.pop(reply.call_id, None)
        if call is not None:
            self._succeeded = True
            call.end(reply.done)


class _Child:
    """The process. One thread reads its replies; any thread may send calls."""

    def __init__(self, setup: PoolSetup) -> None:
        """Starts it. Raises OSError when the host has no room for another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=_environment(setup.protocol),
                    pass_fds=(theirs.fileno(), *(one.descriptor for one in setup.memories)),
                )
            except OSError:
                ours.close()
                raise
        self._channel = ours
        self._channel.setblocking(False)
        self._channel.send(setup_to_packet(setup))

    def fileno(self) -> int:
        """For select: readable when replies have come, or when the process has ended."""
        return self._channel.fileno()

    @property
    def process_id(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, call: PoolCall) -> bool:
        """Whether the process will get the call. It does not while it reads too slowly."""
        try:
            self._channel.send(call_to_packet(call))
        except OSError:
            return False
        return True

    def read(self) -> PoolReply | None:
        """The next reply. None when there is none yet. Raises EOFError when the process has ended."""
        try:
            packet = self._channel.recv(PACKET_BYTES_MAX)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise EOFError from error
        if not packet:
            raise EOFError
        return reply_from_packet(packet)

    def kill(self) -> None:
        """Ends the process. When it returns, the process uses no memory any more."""
        self._process.kill()
        self._process.wait()
        self._channel.close()


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
    host: str,
    rdma_devices: Sequence[str] = (),
    admitted: Networks | None = None,
) -> PoolOpener:
    """Opens the store at `settings.pool_address`. `host` is this worker's address."""

    def open_pool(
        memories: Sequence[PoolMemory], secret: bytes, on_lost: Callable[[], None]
    ) -> RemotePool:
        protocol, _ = protocol_environment("auto")
        callers: tuple[str, ...] | None = ()
        if protocol == "rdma":
            # Peers connect back, unlike over TCP.
            callers = None if admitted is None else tuple(map(str, admitted))
        setup = PoolSetup(
            master=settings.pool_address,
            host=host,
            secret=secret,
            memories=tuple(memories),
            protocol=protocol,
            rdma_devices=",".join(rdma_devices),
            admitted=callers,
        )
        return RemotePool(setup, on_lost)

    return open_pool
