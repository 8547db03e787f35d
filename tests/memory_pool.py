"""A remote pool within one process that can inject faults, for tests of everything above a pool."""

from __future__ import annotations

import ctypes
import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from headrace_kv.tiers.pool import RemotePool
from headrace_kv.tiers.pool_process import (
    PRESENT,
    STORED,
    MooncakeStore,
    PoolMemory,
    PoolSetup,
    Slots,
    serve,
)

ABSENT = -704
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


class _Process:
    """A thread that stands for the process of a pool."""

    pid = 0

    def __init__(self, store: MemoryStore, channel: socket.socket) -> None:
        self._channel = channel
        self._store = store
        threading.Thread(target=self._serve, name="kv-pool-process", daemon=True).start()

    def kill(self) -> None:
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        return

    def _serve(self) -> None:
        with self._channel:
            serve(self._channel, lambda *_, **__: self._store)


class InMemoryPool(RemotePool):
    """A worker's access to a MemoryStore. After a call that ended late or failed it stays closed."""

    def __init__(
        self,
        store: MemoryStore,
        memories: Sequence[PoolMemory],
        secret: bytes,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._store: MemoryStore | None = store
        super().__init__(PoolSetup("memory", "", secret.hex(), memories), on_lost)
        due_s = time.monotonic() + _STALL_MAX_S
        while not self.is_open and time.monotonic() < due_s:
            time.sleep(0.001)

    def _start(self, ours: socket.socket, theirs: socket.socket) -> Any:
        store, self._store = self._store, None
        if store is None:
            raise OSError(errno.EAGAIN, "it stays closed")
        return _Process(store, theirs.dup())
