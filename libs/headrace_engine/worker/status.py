"""WorkerService, the same for prefill and decode workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from headrace.worker.v1 import time_model_pb2, worker_pb2, worker_pb2_grpc
from headrace_common.access.roles import Role, current_caller
from headrace_common.callers.bounds import host_of_peer
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PermissionDenied,
    QueueFull,
    StaleIncarnation,
)
from headrace_common.limits import (
    DRAIN_GRACE_MAX_S,
    STATUS_STREAMS_MAX,
    STATUS_STREAMS_OF_CALLER_MAX,
)
from headrace_common.process.events import EVENTS
from headrace_common.tasks import wait_briefly
from headrace_common.tickets import TicketKeys
from headrace_common.time_model.model import TimeModel, time_model_to_proto
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.steps import Stall, StepWatch
from headrace_engine.worker.adapters import ChangeAdapter
from headrace_kv.layout import WorkerRef

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class WatchedStatus:
    """A worker's status with the stall of its engine, if there is one. Logs its start and its end."""

    status: Callable[[], worker_pb2.WatchStatusResponse]
    steps: StepWatch
    _stall: Stall | None = field(default=None, init=False)

    def read(self) -> worker_pb2.WatchStatusResponse:
        """The status now."""
        status = self.status()
        stall = self.steps.stall()
        if stall is not None:
            status.stall.CopyFrom(_stall_to_proto(stall))
            if self._stall is None:
                _LOG.warning("%s is stalled: %s", status.worker_id, stall)
                EVENTS.alarm(f"{status.worker_id} is stalled: {stall}")
        elif self._stall is not None:
            _LOG.warning(
                "%s steps again, after a stall of %.0f s", status.worker_id, self._stall.age_s
            )
        self._stall = stall
        return status


def _stall_to_proto(stall: Stall) -> worker_pb2.Stall:
    return worker_pb2.Stall(
        age=duration_from_seconds(int(stall.age_s)),
        bound=duration_from_seconds(stall.bound_s),
        request_count=stall.requests,
        token_count=stall.tokens,
    )


class StatusSignal:
    """The worker gives it when it begins something: a request, or its end. One event loop owns it."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    def notify(self) -> None:
        """The worker's status may change from now on."""
        self._begun.set()
        self._begun = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Returns at the next `notify`, after `seconds` at the latest."""
        await wait_briefly(self._begun.wait(), seconds)


DEFAULT_INTERVAL_S = 1.0
SHORTEST_INTERVAL_S = 0.1
LONGEST_INTERVAL_S = 60.0
# A worker with requests sends as often as this, whatever the caller accepts.
BUSY_INTERVAL_S = 1.0
POLL_S = 0.1
RESET_WAIT_S = 60.0
# The response must arrive before the caller's deadline.
RESPONSE_MARGIN_S = 0.2


@dataclass(eq=False)
class WorkerStatusServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Streams the results of `snapshot`: at once, on every change, and at least once per interval.

    Changes are found by polling every `POLL_S`, once for all streams. So the owners of requests need no list of
    watchers, and a burst of changes is one message. An idle worker waits for `signal` instead.

    `reset_prefix_cache` is Engine's, and `change_adapter` WorkerAdapters'. `on_drain` starts a drain with the given
    grace in seconds, or with the own one for None, and returns its deadline. `ticket_keys` gets the keys of routers
    while their stream is open; a worker without it ignores them. `times` is what the worker has learned,
    `device_time` what its time was spent on.
    """

    snapshot: Callable[[], worker_pb2.WatchStatusResponse]
    prefix_events: PrefixEventPublisher
    signal: StatusSignal
    reset_prefix_cache: Callable[[], Awaitable[bool]]
    on_drain: Callable[[float | None], Deadline]
    change_adapter: ChangeAdapter
    times: Callable[[], TimeModel] = TimeModel
    device_time: Callable[[], time_model_pb2.DeviceTime] = time_model_pb2.DeviceTime
    ticket_keys: TicketKeys | None = None
    _keeps_answers: bool = field(default=False, init=False)
    _streams: Counter[str] = field(default_factory=Counter, init=False)
    """Open streams by caller."""
    _poll: asyncio.Task[worker_pb2.WatchStatusResponse] | None = field(default=None, init=False)

    async def WatchStatus(
        self,
        request: worker_pb2.WatchStatusRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.WatchStatusRequest, worker_pb2.WatchStatusResponse
        ],
    ) -> AsyncIterator[worker_pb2.WatchStatusResponse]:
        """See worker.proto."""
        interval_s = interval_s_of(request)
        self._count_stream(context)
        if request.ticket_public_key:
            self._use_ticket_key(request.ticket_public_key, context)
        status = self._status()
        while True:
            stamped = self._stamped(status)
            EVENTS.add_message(stamped)
            yield stamped
            sent, idle = status, _is_idle(status)
            due = Deadline.after(interval_s if idle else min(interval_s, BUSY_INTERVAL_S))
            while status == sent and not due.expired:
                # The signal may have been given after that status was made.
                if idle and self._status() == sent:
                    await self.signal.wait(due.remaining_s())
                status = self._status() if idle else await self._polled(due)

    def _count_stream(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Counts a stream until it ends. Raises QueueFull beyond the streams of one caller, or of all."""
        caller = current_caller().name or host_of_peer(context.peer())
        for used, bound in (
            (self._streams[caller], STATUS_STREAMS_OF_CALLER_MAX),
            (self._streams.total(), STATUS_STREAMS_MAX),
        ):
            if used >= bound:
                raise QueueFull(
                    f"{used} streams of this worker's state are open; end some",
                    metadata={"queue": "status streams", "maxsize": str(bound), "caller": caller},
                )
        self._streams[caller] += 1
        # gRPC may drop a suspended generator without closing it. The stubs' callback type is a plain class.
        context.add_done_callback(lambda _: self._streams.subtract([caller]))  # type: ignore[arg-type]

    def _use_ticket_key(
        self, public_key: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Accepts a router's tickets until its stream ends, and for a bounded time after that."""
        if Role.ROUTER not in current_caller().roles:
            raise PermissionDenied(
                "a ticket key is for the role router; watch the status without one",
                metadata={"field": "ticket_public_key", "allowed_roles": Role.ROUTER},
            )
        if self.ticket_keys is None:
            return
        try:
            use = self.ticket_keys.use(public_key)
        except ValueError as error:
            raise InvalidRequest({"ticket_public_key": str(error)}) from error
        # gRPC may drop a suspended generator without closing it. The stubs' callback type is a plain class.
        context.add_done_callback(lambda _: use.end())  # type: ignore[arg-type]

    async def _polled(self, due: Deadline) -> worker_pb2.WatchStatusResponse:
        """The status after POLL_S at most, or when `due` has passed. All streams that wait share it."""

        async def poll() -> worker_pb2.WatchStatusResponse:
            await asyncio.sleep(POLL_S)
            return self._status()

        if (polling := self._poll) is None or polling.done():
            polling = self._poll = asyncio.create_task(poll())
        await asyncio.wait([polling], timeout=due.remaining_s())
        return polling.result() if polling.done() else self._status()

    def _status(self) -> worker_pb2.WatchStatusResponse:
        status = self.snapshot()
        status.keeps_answers = self._keeps_answers
        if self.prefix_events.hashing is not None:
            status.kv_hashing.CopyFrom(self.prefix_events.hashing)
        return status

    def _stamped(self, status: worker_pb2.WatchStatusResponse) -> worker_pb2.WatchStatusResponse:
        """The status with the time of sending and the time model, which make no change of the state."""
        stamped = worker_pb2.WatchStatusResponse(
            sent_unix_ns=time.time_ns(),
            times=time_model_to_proto(self.times()),
            device_time=self.device_time(),
        )
        stamped.MergeFrom(status)
        return stamped

    async def SubscribeKvEvents(
        self,
        request: worker_pb2.SubscribeKvEventsRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.SubscribeKvEventsRequest, worker_pb2.SubscribeKvEventsResponse
        ],
    ) -> AsyncIterator[worker_pb2.SubscribeKvEventsResponse]:
        interval_s = interval_s_of(request)
        _check_incarnation(request.incarnation, self.prefix_events.ref)
        self._count_stream(context)
        with self.prefix_events.subscribe(request.since_sequence) as subscription:
            async for message in subscription.messages(interval_s):
                yield message

    async def ResetPrefixCache(
        self,
        request: worker_pb2.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.ResetPrefixCacheRequest, worker_pb2.ResetPrefixCacheResponse
        ],
    ) -> worker_pb2.ResetPrefixCacheResponse:
        ref = self.prefix_events.ref
        if request.incarnation:
            _check_incarnation(request.incarnation, ref)
        remaining_s = Deadline.from_context(context, RESET_WAIT_S).remaining_s()
        late = Deadline.after(min(RESET_WAIT_S, remaining_s - RESPONSE_MARGIN_S))
        while not await self.reset_prefix_cache():
            if late.expired:
                held = self.snapshot().used_blocks
                raise DeadlineExceeded(
                    f"requests still hold {held} KV blocks: try again when the worker has less to do",
                    metadata={"worker_id": ref.worker_id, "used_blocks": str(held)},
                )
            await asyncio.sleep(POLL_S)
        return worker_pb2.ResetPrefixCacheResponse()

    async def ChangeAdapter(
        self,
        request_iterator: AsyncIterator[worker_pb2.ChangeAdapterRequest],
        context: grpc.aio.ServicerContext[
            worker_pb2.ChangeAdapterRequest, worker_pb2.ChangeAdapterResponse
        ],
    ) -> AsyncIterator[worker_pb2.ChangeAdapterResponse]:
        """See worker.proto."""
        async with aclosing(self.change_adapter(request_iterator)) as answers:
            async for answer in answers:
                yield answer

    async def Drain(
        self,
        request: worker_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[worker_pb2.DrainRequest, worker_pb2.DrainResponse],
    ) -> worker_pb2.DrainResponse:
        """See worker.proto."""
        status = self.snapshot()
        _check_incarnation(request.incarnation, WorkerRef(status.worker_id, status.incarnation))
        grace_s: float | None = None
        if request.HasField("grace"):
            grace_s = _bounded_seconds(request.grace, "grace", 0.0, DRAIN_GRACE_MAX_S)
        if status.state != worker_pb2.WatchStatusResponse.STATE_DRAINING:
            self._keeps_answers = request.keep_answers
        deadline = self.on_drain(grace_s)
        return worker_pb2.DrainResponse(
            remaining=duration_from_seconds(deadline.remaining_s()),
            request_count=status.running_requests + status.waiting_requests,
        )


def _is_idle(status: worker_pb2.WatchStatusResponse) -> bool:
    """Whether nothing changes in a worker before it begins something."""
    return status.state == worker_pb2.WatchStatusResponse.STATE_SERVING and not (
        status.HasField("stall")
        or status.running_requests
        or status.waiting_requests
        or status.active_transfers
        or status.reserved_blocks
        or status.quarantined_blocks
        or status.used_blocks
    )


def _check_incarnation(incarnation: str, actual: WorkerRef) -> None:
    if incarnation != actual.incarnation:
        raise StaleIncarnation(
            f"this is {actual}, not incarnation {incarnation or '(none)'}",
            metadata={"worker_id": actual.worker_id, "incarnation": actual.incarnation},
        )


def interval_s_of(
    request: worker_pb2.WatchStatusRequest | worker_pb2.SubscribeKvEventsRequest,
) -> float:
    """Seconds without a message that the caller accepts. Raises InvalidRequest when out of range."""
    if not request.HasField("max_interval"):
        return DEFAULT_INTERVAL_S
    return _bounded_seconds(
        request.max_interval, "max_interval", SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S
    )


def _bounded_seconds(duration: Duration, field: str, least_s: float, most_s: float) -> float:
    seconds = seconds_from_duration(duration)
    if not least_s <= seconds <= most_s:
        raise InvalidRequest({field: f"must be {least_s:g} s to {most_s:g} s, not {seconds:g} s"})
    return seconds
