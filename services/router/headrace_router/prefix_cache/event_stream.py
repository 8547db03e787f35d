"""Follows the KV events of one worker into an index."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final, Literal

import grpc
import grpc.aio

from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.errors import ProtocolViolation
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.prefix.events import event_from_proto
from headrace_router.prefix_cache.index import ApplyResult, PrefixIndex

_LOG = logging.getLogger(__name__)

# A worker without an event for this long loses the credit for its cache. Workers send heartbeats.
EVENT_TIMEOUT_S: Final = 5.0
_BACKOFF_MIN_S: Final = 0.05
_BACKOFF_MAX_S: Final = 5.0

_EndReason = Literal["broken", "resync", "unserved"]


class KvEventFeed:
    """Applies the events of one incarnation of a worker to `index`, until closed.

    After a lost event, a different digest or a broken stream it subscribes again. The delay grows with each attempt
    until a heartbeat matches. A worker that serves no events gets no credit, and neither does another incarnation.
    `on_hashing` receives the worker's hashing parameters with every heartbeat.
    """

    def __init__(
        self,
        ref: WorkerRef,
        endpoint: str,
        index: PrefixIndex,
        open_channel: Callable[[str], grpc.aio.Channel],
        event_timeout_s: float = EVENT_TIMEOUT_S,
        on_hashing: Callable[[worker_pb2.KvHashing], None] | None = None,
    ) -> None:
        self.ref = ref
        self.endpoint = endpoint
        self.index = index
        self._event_timeout_s = event_timeout_s
        self._on_hashing = on_hashing
        self._failure_count = 0
        self._last_event_s = asyncio.get_running_loop().time()
        self._closing: asyncio.Task[None] | None = None
        index.add_worker(ref)
        self._channel = open_channel(endpoint)
        self._task = asyncio.create_task(self._follow(), name=f"kv-events-{ref}")
        self._task.add_done_callback(self._on_task_done)

    def check_timeout(self) -> None:
        """Suspends the worker when its last event is too old. Must be called regularly."""
        if asyncio.get_running_loop().time() - self._last_event_s > self._event_timeout_s:
            self.index.suspend(self.ref)

    def close(self) -> asyncio.Task[None]:
        """Removes the worker from the index at once. The returned task ends once the channel is closed."""
        if self._closing is None:
            self.index.remove_worker(self.ref)
            self._task.cancel()
            self._closing = asyncio.create_task(self._end_stream())
        return self._closing

    async def _end_stream(self) -> None:
        await asyncio.wait([self._task])
        await self._channel.close()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.index.suspend(self.ref)
            _LOG.critical("a bug ended the KV event stream of %s", self.ref, exc_info=error)

    async def _follow(self) -> None:
        while True:
            if await self._subscribe() == "unserved":
                self.index.suspend(self.ref)
                return
            delay_s = min(_BACKOFF_MAX_S, _BACKOFF_MIN_S * 2.0 ** min(self._failure_count, 16))
            self._failure_count += 1
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def _subscribe(self) -> _EndReason:
        """Applies events until the stream ends or the index needs another subscription."""
        request = worker_pb2.SubscribeKvEventsRequest(
            incarnation=self.ref.incarnation, since_sequence=self.index.resume_after(self.ref)
        )
        call = worker_pb2_grpc.WorkerServiceStub(self._channel).SubscribeKvEvents(request)
        try:
            while True:
                async with asyncio.timeout(self._event_timeout_s):
                    message = await call.read()
                if not isinstance(message, worker_pb2.SubscribeKvEventsResponse):
                    return "broken"
                if self._apply(message) is ApplyResult.NEEDS_RESYNC:
                    return "resync"
        except grpc.aio.AioRpcError as error:
            return self._end_reason(error)
        except TimeoutError:
            _LOG.warning("%s has sent no KV events for %g s", self.ref, self._event_timeout_s)
        except ProtocolViolation as error:
            _LOG.warning("KV events of %s: %s", self.ref, error.detail)
        finally:
            call.cancel()
        return "broken"

    def _apply(self, message: worker_pb2.SubscribeKvEventsResponse) -> ApplyResult:
        event = event_from_proto(message)
        if self._on_hashing is not None and message.heartbeat.HasField("hashing"):
            self._on_hashing(message.heartbeat.hashing)
        result = self.index.apply(self.ref, event)
        if result is ApplyResult.APPLIED:
            self._last_event_s = asyncio.get_running_loop().time()
            if event.kind == "heartbeat":
                self._failure_count = 0
        return result

    def _end_reason(self, error: grpc.aio.AioRpcError) -> _EndReason:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            _LOG.info("%s serves no KV events", self.ref)
            return "unserved"
        if self._failure_count == 0:
            _LOG.warning(
                "KV events of %s ended: %s: %s", self.ref, error.code().name, error.details()
            )
        return "broken"
