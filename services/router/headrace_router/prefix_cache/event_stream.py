"""Follows the KV events of one worker into an index."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Literal

import grpc
import grpc.aio

from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import ProtocolViolation
from headrace_common.process.pacing import SHORTEST_S, must_change
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import event_from_proto
from headrace_router.prefix_cache.index import ApplyResult, PrefixIndex
from headrace_router.workers.dials import Dials, RetryDelay

_LOG = logging.getLogger(__name__)

# A worker that should send every second loses the credit for its cache without an event for this long.
EVENT_TIMEOUT_S: Final = 5.0
_BACKOFF_MIN_S: Final = 0.05
_BACKOFF_MAX_S: Final = 5.0

_EndReason = Literal["broken", "paced", "resync", "unserved"]


class KvEventFeed:
    """Applies the events of one incarnation of a worker to an index, until closed.

    After a lost event, a different digest or a broken stream it subscribes again. The delay grows with each attempt
    until a heartbeat matches. A worker that serves no events gets no credit, and neither does another incarnation.
    `on_heartbeat` receives every heartbeat.

    `find_index` is called when the first event arrives. It returns None when the index is full. Until then the worker
    has no place in an index, and between two tries no channel.
    """

    def __init__(
        self,
        ref: WorkerRef,
        endpoint: str,
        find_index: Callable[[], PrefixIndex | None],
        open_channel: Callable[[str], grpc.aio.Channel],
        dials: Dials,
        event_timeout_s: float = EVENT_TIMEOUT_S,
        on_heartbeat: Callable[[worker_pb2.SubscribeKvEventsResponse], None] | None = None,
        *,
        interval_s: float = SHORTEST_S,
    ) -> None:
        self._interval_s = self._wanted_interval_s = interval_s
        self.ref = ref
        self.endpoint = endpoint
        self.index: PrefixIndex | None = None
        self._find_index = find_index
        self._open_channel = open_channel
        self._dials = dials
        self._retry = RetryDelay(_BACKOFF_MIN_S, _BACKOFF_MAX_S)
        self._channel: grpc.aio.Channel | None = None
        self._event_timeout_s = event_timeout_s
        self._on_heartbeat = on_heartbeat
        self._due_s = asyncio.get_running_loop().time() + self._limit_s
        self._closing: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._follow(), name=f"kv-events-{ref}")
        self._task.add_done_callback(self._on_task_done)

    def check_timeout(self, now_s: float) -> float:
        """Suspends the worker when its last event is too old, by the loop's time. Returns when to call it again."""
        if now_s <= self._due_s:
            return self._due_s
        self._suspend()
        return now_s + self._event_timeout_s

    def set_interval(self, interval_s: float) -> None:
        """Asks for other heartbeats after the next event, if the difference is worth a new stream."""
        self._wanted_interval_s = interval_s

    @property
    def _limit_s(self) -> float:
        return self._event_timeout_s + self._interval_s - SHORTEST_S

    def close(self) -> asyncio.Task[None]:
        """Removes the worker from the index at once. The returned task ends once the channel is closed."""
        if self._closing is None:
            if self.index is not None:
                self.index.remove_worker(self.ref)
            self._task.cancel()
            self._closing = asyncio.create_task(self._end_stream())
        return self._closing

    async def _end_stream(self) -> None:
        await asyncio.wait([self._task])
        await self._close_channel()

    async def _close_channel(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    def _suspend(self) -> None:
        if self.index is not None:
            self.index.suspend(self.ref)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._suspend()
            _LOG.critical("a bug ended the KV event stream of %s", self.ref, exc_info=error)

    async def _follow(self) -> None:
        while True:
            reason = await self._subscribe()
            if reason == "unserved":
                self._suspend()
                return
            if reason == "paced":
                continue
            if self.index is None:
                await self._close_channel()
            await asyncio.sleep(self._retry.failed_s())

    async def _subscribe(self) -> _EndReason:
        """Applies events until the stream ends or the index needs another subscription."""
        call: Any = None
        try:
            async with self._dials.turn(self._retry):
                call = self._call()
                message = await self._next_message(call)
            if message is not None and self.index is None:
                self._open_index()
            while message is not None and self.index is not None:
                if self._apply(self.index, message) is ApplyResult.NEEDS_RESYNC:
                    return "resync"
                if must_change(self._interval_s, self._wanted_interval_s):
                    return "paced"
                message = await self._next_message(call)
        except grpc.aio.AioRpcError as error:
            return self._end_reason(error)
        except TimeoutError:
            _LOG.warning("%s has sent no KV events for %g s", self.ref, self._limit_s)
        except ProtocolViolation as error:
            _LOG.warning("KV events of %s: %s", self.ref, error.detail)
        finally:
            if call is not None:
                call.cancel()
        return "broken"

    def _call(self) -> Any:
        if self._channel is None:
            self._channel = self._open_channel(self.endpoint)
        since = 0 if self.index is None else self.index.resume_after(self.ref)
        self._interval_s = self._wanted_interval_s
        return worker_pb2_grpc.WorkerServiceStub(self._channel).SubscribeKvEvents(
            worker_pb2.SubscribeKvEventsRequest(
                incarnation=self.ref.incarnation,
                since_sequence=since,
                max_interval=duration_from_seconds(self._interval_s),
            )
        )

    async def _next_message(self, call: Any) -> worker_pb2.SubscribeKvEventsResponse | None:
        """None at the end of the stream."""
        async with asyncio.timeout(self._limit_s):
            message = await call.read()
        return message if isinstance(message, worker_pb2.SubscribeKvEventsResponse) else None

    def _open_index(self) -> None:
        index = self._find_index()
        if index is not None:
            index.add_worker(self.ref)
            self.index = index

    def _apply(
        self, index: PrefixIndex, message: worker_pb2.SubscribeKvEventsResponse
    ) -> ApplyResult:
        event = event_from_proto(message)
        if self._on_heartbeat is not None and event.kind == "heartbeat":
            self._on_heartbeat(message)
        result = index.apply(self.ref, event)
        if result is ApplyResult.APPLIED:
            self._due_s = asyncio.get_running_loop().time() + self._limit_s
            if event.kind == "heartbeat":
                self._retry.answered()
        return result

    def _end_reason(self, error: grpc.aio.AioRpcError) -> _EndReason:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            _LOG.info("%s serves no KV events", self.ref)
            return "unserved"
        if self._retry.failures == 0:
            _LOG.warning(
                "KV events of %s ended: %s: %s", self.ref, error.code().name, error.details()
            )
        return "broken"
