"""Tracks the RPCs that a server is answering, so that a drain can wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, Draining
from headrace_common.rpc.handlers import Context, Handler, WrappingInterceptor, guarded

# Streams that last until one end stops. Waiting for them would always use up the grace.
_ENDLESS = frozenset(
    {
        "/headrace.decode.v1.DecodeService/Link",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/headrace.registry.v1.RegistryService/KeepAlive",
        "/headrace.registry.v1.RegistryService/Watch",
        "/headrace.worker.v1.WorkerService/SubscribeKvEvents",
        "/headrace.worker.v1.WorkerService/WatchStatus",
        "/headrace.prefill.v1.PrefillQueueService/Pull",
        "/headrace.kv.v1.HandoffService/Handoff",
    }
)


class InFlightInterceptor(WrappingInterceptor):
    """Tracks RPCs in flight: answers, which end by themselves, and endless streams, which do not."""

    def __init__(self) -> None:
        super().__init__()
        self._answering: set[asyncio.Task[Any]] = set()
        self._streams: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._cancelling = False

    @property
    def answer_count(self) -> int:
        """RPCs in flight, less the endless streams."""
        return len(self._answering)

    def wrap(self, handler: Handler, method: str) -> Handler:
        return guarded(handler, self._track_stream if method in _ENDLESS else self._track_answer)

    async def wait_answered(self, deadline: Deadline) -> bool:
        """Waits until `answer_count` is 0. False when the deadline passes first."""
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def cancel_all(self) -> None:
        """Ends every RPC with Draining, also those that the server cancels later."""
        self._cancelling = True
        for task in self._streams | self._answering:
            task.cancel()

    @asynccontextmanager
    async def _track_answer(self, context: Context) -> AsyncIterator[None]:
        task = _current_task()
        self._answering.add(task)
        self._idle.clear()
        try:
            with self._as_draining(task):
                yield
        finally:
            self._answering.discard(task)
            if not self._answering:
                self._idle.set()

    @asynccontextmanager
    async def _track_stream(self, context: Context) -> AsyncIterator[None]:
        task = _current_task()
        self._streams.add(task)
        try:
            with self._as_draining(task):
                yield
        finally:
            self._streams.discard(task)

    @contextmanager
    def _as_draining(self, task: asyncio.Task[Any]) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            if not self._cancelling:
                raise
            task.uncancel()
            raise Draining("the process is shutting down") from None


class EndlessStreams(WrappingInterceptor):
    """Ends streams without an end after `age_s`. Any caller may open one, and would keep its connection by it."""

    def __init__(self, age_s: float) -> None:
        super().__init__()
        self._age_s = age_s

    def wrap(self, handler: Handler, method: str) -> Handler:
        return guarded(handler, self._bound_age) if method in _ENDLESS else handler

    @asynccontextmanager
    async def _bound_age(self, context: Context) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._age_s):
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"a stream without end lasts {self._age_s:g} s here; open another",
                metadata={"waited_for": "the end of the stream"},
            ) from None


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "grpc.aio runs every handler in a task"
    return task
