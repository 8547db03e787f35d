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

# Without a word for this long, what the worker last said counts no more.
SILENCE_S: Final = 5.0
_BACKOFF_MIN_S: Final = 0.05
_BACKOFF_MAX_S: Final = 5.0

_Ended = Literal["broken", "resync", "unserved"]


class KvEventFeed:
    """Keeps `index` up to date on one incarnation of a worker, until closed.

    After a lost event, a digest that differs or a broken stream it subscribes again, waiting longer each time until a
    heartbeat agrees. A worker that serves no events, or has become another incarnation, just has no credit.
    `on_hashing` hears with every heartbeat how the worker names its blocks.
    """

    def __init__(
        self,
        ref: WorkerRef,
        endpoint: str,
        index: PrefixIndex,
        open_channel: Callable[[str], grpc.aio.Channel],
        silence_s: float = SILENCE_S,
        on_hashing: Callable[[worker_pb2.KvHashing], None] | None = None,
    ) -> None:
        self.ref = ref
        self.endpoint = endpoint
        self.index = index
        self._silence_s = silence_s
        self._on_hashing = on_hashing
        self._failure_count = 0
        self._heard_s = asyncio.get_running_loop().time()
        self._closing: asyncio.Task[None] | None = None
        index.add_worker(ref)
        self._channel = open_channel(endpoint)
        self._task = asyncio.create_task(self._follow(), name=f"kv-events-{ref}")
        self._task.add_done_callback(self._ended)

    def check_silence(self) -> None:
        """To be called every now and then."""
        if asyncio.get_running_loop().time() - self._heard_s > self._silence_s:
            self.index.suspend(self.ref)

    def close(self) -> asyncio.Task[None]:
        """Takes the worker out of the index at once. The task ends with the stream."""
        if self._closing is None:
            self.index.remove_worker(self.ref)
            self._task.cancel()
            self._closing = asyncio.create_task(self._end_stream())
        return self._closing

    async def _end_stream(self) -> None:
        await asyncio.wait([self._task])
        await self._channel.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.index.suspend(self.ref)
            _LOG.critical("KV events of %s are lost by a bug", self.ref, exc_info=error)

    async def _follow(self) -> None:
        while True:
            if await self._subscribe() == "unserved":
                self.index.suspend(self.ref)
                return
            delay_s = min(_BACKOFF_MAX_S, _BACKOFF_MIN_S * 2.0 ** min(self._failure_count, 16))
            self._failure_count += 1
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def _subscribe(self) -> _Ended:
        """Applies events until that makes no more sense."""
        request = worker_pb2.SubscribeKvEventsRequest(
            incarnation=self.ref.incarnation, since_sequence=self.index.resume_after(self.ref)
        )
        call = worker_pb2_grpc.WorkerServiceStub(self._channel).SubscribeKvEvents(request)
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await call.read()
                if not isinstance(message, worker_pb2.SubscribeKvEventsResponse):
                    return "broken"
                if self._apply(message) is ApplyResult.NEEDS_RESYNC:
                    return "resync"
        except grpc.aio.AioRpcError as error:
            return self._explain(error)
        except TimeoutError:
            _LOG.warning("%s has sent no KV events for %g s", self.ref, self._silence_s)
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
            self._heard_s = asyncio.get_running_loop().time()
            if event.kind == "heartbeat":
                self._failure_count = 0
        return result

    def _explain(self, error: grpc.aio.AioRpcError) -> _Ended:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            _LOG.info("%s serves no KV events", self.ref)
            return "unserved"
        if self._failure_count == 0:
            _LOG.warning(
                "KV events of %s ended: %s: %s", self.ref, error.code().name, error.details()
            )
        return "broken"
