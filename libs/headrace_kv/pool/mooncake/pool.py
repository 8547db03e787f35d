"""A remote pool in Mooncake Store, which a process of its own calls. No call of a worker waits for that process."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from headrace_kv.pool.base import BATCH_BLOCKS_MAX, OWN_SHARD, RemotePool, refused
from headrace_kv.pool.mooncake.child import PoolChild
from headrace_kv.pool.mooncake.messages import Operation, PoolCall, PoolReply, PoolSetup

log = logging.getLogger(__name__)

CALLS_MAX: Final = 64
"""Calls in flight. Further ones are refused."""
START_LIMIT_S: Final = 30.0
REST_FIRST_S: Final = 1.0
"""Pause before another process starts after one that was lost. Each further pause is twice as long."""
REST_MAX_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that the process has not ended."""

    future: Future[list[bool]]
    count: int
    due_s: float

    def end(self, done: Sequence[bool] = ()) -> None:
        """Without `done`, no block was moved."""
        self.future.set_result(list(done) or [False] * self.count)


class MooncakePool(RemotePool):
    """Owns the process. A call that ends late ends the process, and with it everything that the call may still do.

    After that, and after every failure of the store, the pool is closed for a while. `on_lost` is called then, on the
    pool's thread, as are callbacks of futures.
    """

    def __init__(self, setup: PoolSetup, on_lost: Callable[[], None] = lambda: None) -> None:
        self._setup = setup
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._child: PoolChild | None = None
        self._calls: dict[int, _Call] = {}
        self._next_id = 1
        self._succeeded = False
        self._closing = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-pool", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._child is not None

    @property
    def process_id(self) -> int:
        """The id of the process; 0 while there is none. For tests."""
        child = self._child
        return 0 if child is None else child.process_id

    def exists(self, keys: Sequence[str], timeout_s: float) -> Future[list[bool]]:
        return self._begin("exists", keys, timeout_s)

    def get(
        self,
        memory: int,
        keys: Sequence[str],
        slots: Sequence[int],
        timeout_s: float,
        shard: int = OWN_SHARD,
    ) -> Future[list[bool]]:
        return self._begin("get", keys, timeout_s, memory, slots, shard)

    def put(
        self, memory: int, keys: Sequence[str], slots: Sequence[int], timeout_s: float
    ) -> Future[list[bool]]:
        return self._begin("put", keys, timeout_s, memory, slots)

    def close(self) -> None:
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
        shard: int = OWN_SHARD,
    ) -> Future[list[bool]]:
        if len(keys) > BATCH_BLOCKS_MAX:
            return refused(len(keys))
        with self._lock:
            if self._child is None or self._closing.is_set() or len(self._calls) >= CALLS_MAX:
                return refused(len(keys))
            call = PoolCall(self._next_id, operation, tuple(keys), memory, tuple(slots), shard)
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
            child = PoolChild(self._setup)
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

    def _wait_ready(self, child: PoolChild) -> str:
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

    def _serve_calls(self, child: PoolChild) -> str:
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

    def _wait(self, child: PoolChild, due_s: float) -> None:
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
