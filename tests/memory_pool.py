"""A remote pool within one process that can inject faults, for tests of everything above a pool."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from headrace_common.errors import TransferFailed
from headrace_kv.tiers.pool import RemotePool, refused
from headrace_kv.tiers.pool_process import (
    ABSENT,
    PRESENT,
    STORED,
    BlockClient,
    Mapping,
    MooncakeStore,
    PoolMemory,
    Slots,
)

_RPC_FAILED = -900
_STALL_MAX_S = 60.0


class MemoryStore(MooncakeStore):
    """The objects of a store, shared by any number of pools. Its faults apply to all of them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._running = threading.Event()
        self._running.set()
        self._lost = False
        self._changes: Callable[[str, bytes], bytes] = lambda _, content: content

    def freeze(self) -> None:
        """Calls stand still from now on, until `thaw`."""
        self._running.clear()

    def thaw(self) -> None:
        """Ends `freeze`. Calls that stood still fail."""
        self._running.set()

    def lose(self) -> None:
        """Calls fail from now on, and the objects are gone."""
        with self._lock:
            self._lost = True
            self.objects.clear()

    def change_reads(self, change: Callable[[str, bytes], bytes]) -> None:
        """Replaces what is read, by key and content. A shorter content is a part of the block."""
        self._changes = change

    def register(self, memories: Sequence[Slots]) -> None:
        return

    def exist(self, keys: list[str]) -> list[int]:
        if not self._answers():
            return [_RPC_FAILED] * len(keys)
        with self._lock:
            return [int(key in self.objects) for key in keys]

    def get(self, keys: list[str], addresses: list[int], nbytes: int) -> list[int]:
        if not self._answers():
            return [_RPC_FAILED] * len(keys)
        codes: list[int] = []
        for key, address in zip(keys, addresses, strict=True):
            with self._lock:
                content = self.objects.get(key)
            if content is None:
                codes.append(ABSENT)
                continue
            read = self._changes(key, content)[:nbytes]
            ctypes.memmove(address, read, len(read))
            codes.append(len(read))
        return codes

    def put(self, keys: list[str], addresses: list[int], nbytes: int) -> list[int]:
        if not self._answers():
            return [_RPC_FAILED] * len(keys)
        codes: list[int] = []
        for key, address in zip(keys, addresses, strict=True):
            with self._lock:
                codes.append(PRESENT if key in self.objects else STORED)
                self.objects.setdefault(key, ctypes.string_at(address, nbytes))
        return codes

    def remove(self, keys: list[str]) -> None:
        with self._lock:
            for key in keys:
                self.objects.pop(key, None)

    def _answers(self) -> bool:
        """Waits while frozen. Whether the call may go on."""
        if not self._running.is_set():
            self._running.wait(_STALL_MAX_S)
            return False
        return not self._lost


class InMemoryPool(RemotePool):
    """A worker's access to a MemoryStore. After a call that ended late or failed it stays closed."""

    def __init__(
        self,
        store: MemoryStore,
        memories: Sequence[PoolMemory],
        secret: bytes,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._mappings = [Mapping(memory) for memory in memories]
        self._client = BlockClient(store, [one.slots for one in self._mappings], secret)
        self._on_lost = on_lost
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-pool")
        self._is_open = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    def exists(self, keys: Sequence[str], timeout_s: float) -> Future[list[bool]]:
        return self._start(partial(self._client.exists, keys), len(keys), timeout_s)

    def get(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        return self._start(partial(self._client.get, memory, keys, slots), len(keys), timeout_s)

    def put(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        return self._start(partial(self._client.put, memory, keys, slots), len(keys), timeout_s)

    def close(self) -> None:
        self._is_open = False
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(
        self, call: Callable[[], list[bool]], count: int, timeout_s: float
    ) -> Future[list[bool]]:
        if not self._is_open:
            return refused(count)
        future: Future[list[bool]] = Future()
        # The first that takes it ends the call: the thread, or the timer.
        claim = threading.Lock()
        end = partial(self._finish, future, claim, [False] * count, lost=True)
        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            self._executor.submit(self._perform, call, future, claim, timer, count)
        except RuntimeError:
            # Another thread closes the pool.
            timer.cancel()
            return refused(count)
        return future

    def _perform(
        self,
        call: Callable[[], list[bool]],
        future: Future[list[bool]],
        claim: threading.Lock,
        timer: threading.Timer,
        count: int,
    ) -> None:
        try:
            done, lost = call(), False
        except TransferFailed:
            done, lost = [False] * count, True
        timer.cancel()
        self._finish(future, claim, done, lost=lost)

    def _finish(
        self, future: Future[list[bool]], claim: threading.Lock, done: list[bool], *, lost: bool
    ) -> None:
        if not claim.acquire(blocking=False):
            return
        closes = lost and self._is_open
        if closes:
            # Before the call ends, so that no caller finds the pool open after it.
            self._is_open = False
        future.set_result(done)
        if closes:
            self._on_lost()
