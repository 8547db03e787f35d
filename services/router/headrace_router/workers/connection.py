"""One decode worker as the router sees it: its channel, its latest status and the load reserved on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import grpc
import grpc.aio

from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import WorkerGone
from headrace_common.limits import CLOCK_OFFSET_NOTED_S
from headrace_common.process.events import EVENTS
from headrace_common.process.pacing import SHORTEST_S, LoopLoad, must_change
from headrace_common.rpc.channel import ping_timeout_s
from headrace_common.tasks import end_task, run_forever, wait_silent
from headrace_common.time_model.model import time_model_from_proto
from headrace_kv.layout import WorkerRef
from headrace_router.decode_link.link import DecodeLinks
from headrace_router.workers.dials import Dials, RetryDelay
from headrace_router.workers.table import NO_TIMES, Load, PromptQueue, Worker

_LOG = logging.getLogger(__name__)

# A clock that is set back is known after as many messages. A worker with requests sends at least one a second.
_MESSAGES: Final = 8


class WorkerClock:
    """Relates a worker's wall clock to this process's monotonic clock: setting the router's clock has no effect.

    Each message shows that the worker's clock is at least as far ahead as the difference of two times: the sending, by
    the worker's clock, and the receipt, by ours. The greatest difference of the last messages is the estimate. So the
    estimate is never ahead of the worker's clock, and behind by the delay of the fastest message. A large offset is
    logged, and each change of it.
    """

    def __init__(self, ref: WorkerRef) -> None:
        self._ref = ref
        self._differences_ns: deque[int] = deque(maxlen=_MESSAGES)
        self._noted_offset_s = 0.0

    @property
    def known(self) -> bool:
        """Whether the worker has sent its time."""
        return bool(self._differences_ns)

    def received(self, sent_unix_ns: int, *, received_ns: int) -> None:
        """A message arrived at `received_ns` of the monotonic clock."""
        self._differences_ns.append(sent_unix_ns - received_ns)
        offset_s = self.offset_s()
        if abs(offset_s - self._noted_offset_s) < CLOCK_OFFSET_NOTED_S:
            return
        self._noted_offset_s = offset_s
        if abs(offset_s) < CLOCK_OFFSET_NOTED_S:
            _LOG.info("the clock of decode worker %s agrees with this router's", self._ref)
            return
        _LOG.warning(
            "the clock of decode worker %s is %.1f s %s this router's, so times in logs are wrong: set the clocks of "
            "both hosts",
            self._ref,
            abs(offset_s),
            "ahead of" if offset_s > 0 else "behind",
        )

    def offset_s(self) -> float:
        """How far the worker's clock is ahead of this process's; negative when it is behind. 0 while it is unknown."""
        if not self.known:
            return 0.0
        return (max(self._differences_ns) + time.monotonic_ns() - time.time_ns()) / 1e9


# A worker that should send every second counts as unreachable without a status for this long.
_STATUS_TIMEOUT_S = 3.0
# An idle worker may be later than its interval by this time.
_IDLE_MARGIN_S = 2.0
# A worker with requests is stuck without a status for this long and gRPC's ping timeout. Pings alone show no stuck
# event loop: gRPC's own threads answer them.
_SILENCE_S = 2.0
# The delay before the second try. See RetryDelay.
_RECONNECT_S = 0.5


class LoadReservation:
    """A request placed on a worker. It keeps the worker's channel and links open until released."""

    __slots__ = ("_connection", "links", "routed", "status_count", "tokens")

    def __init__(
        self, connection: WorkerConnection, tokens: int, status_count: int, *, routed: bool
    ) -> None:
        """`status_count`: how many statuses had arrived from the worker. `routed`: see WorkerDirectory.reserve_load."""
        self._connection: WorkerConnection | None = connection
        self.tokens = tokens
        self.status_count = status_count
        self.routed = routed
        self.links = connection.links

    def release(self) -> None:
        """The request has ended. Repeats are ignored."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release(self)


class WorkerConnection:
    """Follows one decode worker's status. Calls `on_status` after every change of that.

    Calls `on_reserved` after each change of what this router has reserved on it.

    A worker that has never sent a status has no open channel between two tries: gRPC would go on to connect it.

    An idle worker sends every `interval_s`. Its channel's pings show sooner that its process is gone. Once this router
    has a request there, the worker has 3 s to send the change. A worker is stuck while its status has a stall, or once
    it has sent none for longer.
    """

    def __init__(
        self,
        worker: Worker,
        open_channel: Callable[[str], grpc.aio.Channel],
        dials: Dials,
        on_status: Callable[[WorkerConnection], None],
        on_reserved: Callable[[WorkerConnection], None],
        ticket_public_key: bytes,
        interval_s: float = SHORTEST_S,
        load: LoopLoad | None = None,
    ) -> None:
        """`ticket_public_key` is the router's, for the worker. `load` is that of the event loop."""
        self.worker = worker
        self._interval_s = self._wanted_interval_s = interval_s
        self._ticket_public_key = ticket_public_key
        # When the latest status came, or the stream was opened, and since when requests are routed to the worker.
        self._heard_s = 0.0
        self._routed_since_s = 0.0
        self._status_s = 0.0
        self.stuck = ""
        """Why the worker makes no progress. Empty: it does, or nothing is known."""
        self._routed_count = 0
        self._reading: asyncio.Timeout | None = None
        self._open_channel = open_channel
        self._channel: grpc.aio.Channel | None = None
        self.links = DecodeLinks(lambda: self.channel, load)
        self._dials = dials
        self._retry = RetryDelay(_RECONNECT_S)
        # Sums over reservations, so that no change of the load reads all of them.
        self._requests = self._tokens = 0
        # Of the reservations since the latest status.
        self._new_requests = self._new_tokens = 0
        self._status_count = 0
        self._external_requests = 0
        self.prompts = PromptQueue()
        self._times = NO_TIMES
        self._on_status = on_status
        self._on_reserved = on_reserved
        self._status: worker_pb2.WatchStatusResponse | None = None
        self.clock = WorkerClock(worker.ref)
        self._retired = False
        self._closing: asyncio.Task[None] | None = None
        self._watch = run_forever(self._watch_status, f"status of {worker.ref}")
        self._watch_silence = run_forever(self._find_silence, f"silence of {worker.ref}")

    @property
    def has_reported(self) -> bool:
        """Whether the worker has ever sent its status."""
        return self._status_count > 0

    @property
    def closing(self) -> bool:
        """Whether the worker has left the registry, and all its requests have ended."""
        return self._closing is not None

    def registered(self, worker: Worker, interval_s: float) -> None:
        """The registry has the worker, perhaps with other limits.

        Another interval is asked for after the next status, if the difference is worth a new stream.
        """
        self.worker = worker
        self._wanted_interval_s = interval_s

    def end_requests(self) -> None:
        """Ends all requests of this router on a worker that is stuck, so that they continue elsewhere."""
        ref, stuck = self.worker.ref, self.stuck
        self.links.fail(
            lambda: WorkerGone(
                f"decode worker {ref} is stuck: {stuck}", metadata={"worker_id": ref.worker_id}
            )
        )

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to the worker, opened on first use."""
        if self._channel is None:
            self._channel = self._open_channel(self.worker.endpoint)
        return self._channel

    def load(self) -> Load:
        """What the worker reported, and what this router has reserved on it since."""
        status = self._status or worker_pb2.WatchStatusResponse()
        reported = status.running_requests + status.waiting_requests
        block_tokens = self.worker.layout.block_tokens
        draining = status.state == worker_pb2.WatchStatusResponse.STATE_DRAINING
        held_blocks = status.reserved_blocks + status.quarantined_blocks
        return Load(
            requests=max(reported + self._new_requests, self._requests),
            external_requests=self._external_requests,
            # The worker may have sent its status before the latest requests reached it.
            held_tokens=max(held_blocks * block_tokens + self._new_tokens, self._tokens),
            total_tokens=status.total_blocks * block_tokens,
            reachable=self._status is not None and not self.stuck,
            draining=draining,
            leaving=draining and not status.keeps_answers,
            stalled=bool(self.stuck),
            prompts=self.prompts.work,
            times=self._times,
        )

    @property
    def distrusted(self) -> Mapping[WorkerRef, str]:
        """Prefill workers from which the worker rejects transfers, and why."""
        reported = self._status.distrusted_workers if self._status is not None else ()
        return {WorkerRef(one.worker_id, one.incarnation): one.detail for one in reported}

    def reserve(self, tokens: int, *, routed: bool) -> LoadReservation:
        """Counts a request of `tokens` as placed on the worker. `routed`: see WorkerDirectory.reserve_load."""
        reservation = LoadReservation(self, tokens, self._status_count, routed=routed)
        if routed:
            self._routed_count += 1
            if self._routed_count == 1:
                self._routed_since_s = asyncio.get_running_loop().time()
                self._update_due()
        self._requests += 1
        self._tokens += tokens
        self._new_requests += 1
        self._new_tokens += tokens
        self._on_reserved(self)
        return reservation

    def prompts_changed(self) -> None:
        """`prompts` has changed."""
        self._on_reserved(self)

    def release(self, reservation: LoadReservation) -> None:
        """See LoadReservation.release."""
        if reservation.routed:
            self._routed_count -= 1
            if not self._routed_count:
                self._update_due()
        self._requests -= 1
        self._tokens -= reservation.tokens
        if reservation.status_count == self._status_count:
            self._new_requests -= 1
            self._new_tokens -= reservation.tokens
        self._on_reserved(self)
        if self._retired:
            self._close_if_unused()

    def mark_unreachable(self) -> None:
        """A connection to the worker has broken: it is unreachable until its next status."""
        self._set_status(None)
        self._update_due()

    def retire(self) -> None:
        """The worker has left the registry. Requests on it may still end, and its status says whether they move."""
        self._retired = True
        self._watch_silence.cancel()
        self._close_if_unused()

    async def close(self) -> None:
        """Closes the channel."""
        self._watch_silence.cancel()
        await end_task(self._watch)
        await self._close_channel()

    async def _close_channel(self) -> None:
        await self.links.close()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    def _set_status(self, status: worker_pb2.WatchStatusResponse | None) -> None:
        if status is not None:
            self._status_count += 1
            reported = status.running_requests + status.waiting_requests
            self._external_requests = max(0, reported - self._requests)
            self._new_requests = self._new_tokens = 0
            self._status_s = asyncio.get_running_loop().time()
            self._set_stuck(_stall_of(status))
            if status.HasField("times"):
                self._times = time_model_from_proto(status.times, str(self.worker.ref))
        elif self._status is None:
            return
        self._status = status
        self._on_status(self)

    def _set_stuck(self, stuck: str) -> None:
        if bool(stuck) != bool(self.stuck):
            if stuck:
                _LOG.warning("decode worker %s is stuck: %s", self.worker.ref, stuck)
                EVENTS.alarm(f"decode worker {self.worker.ref} is stuck: {stuck}")
            else:
                _LOG.info("decode worker %s steps again", self.worker.ref)
        self.stuck = stuck

    async def _find_silence(self) -> None:
        def silent_since_s() -> float | None:
            """None while no status is due, and once the silence was found."""
            if not (self._routed_count and self.has_reported) or self.stuck:
                return None
            return max(self._status_s, self._routed_since_s)

        limit_s = _SILENCE_S + ping_timeout_s()
        while True:
            silent_s = await wait_silent(silent_since_s, limit_s)
            self._set_stuck(f"it has sent no status for {silent_s:.1f} s")
            self._on_status(self)

    async def _watch_status(self) -> None:
        while True:
            try:
                if await self._follow_status():
                    continue
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                if self._status is not None:
                    _LOG.warning("decode worker %s stopped reporting: %r", self.worker.ref, error)
            self._set_status(None)
            if self._retired:
                return
            if not self.has_reported:
                await self._close_channel()
            await asyncio.sleep(self._retry.failed_s())

    async def _follow_status(self) -> bool:
        """Returns when the stream has ended: True when it is to be opened again with another interval.

        Raises AioRpcError or TimeoutError when it breaks.
        """
        async with self._dials.turn(self._retry):
            self._interval_s = self._wanted_interval_s
            self._heard_s = asyncio.get_running_loop().time()
            request = worker_pb2.WatchStatusRequest(
                max_interval=duration_from_seconds(self._interval_s),
                ticket_public_key=self._ticket_public_key,
            )
            call = worker_pb2_grpc.WorkerServiceStub(self.channel).WatchStatus(request)
            status = await self._next_status(call)
        while status is not None:
            self._retry.answered()
            if status.sent_unix_ns:
                self.clock.received(status.sent_unix_ns, received_ns=time.monotonic_ns())
            self._set_status(status)
            if must_change(self._interval_s, self._wanted_interval_s):
                call.cancel()
                return True
            status = await self._next_status(call)
        call.cancel()
        return False

    async def _next_status(self, call: Any) -> worker_pb2.WatchStatusResponse | None:
        """None when the stream has ended, or belongs to another incarnation."""
        async with asyncio.timeout_at(self._due_s()) as reading:
            self._reading = reading
            try:
                status = await call.read()
            finally:
                self._reading = None
        self._heard_s = asyncio.get_running_loop().time()
        if status is grpc.aio.EOF or status.incarnation != self.worker.ref.incarnation:
            return None
        return cast("worker_pb2.WatchStatusResponse", status)

    def _due_s(self) -> float:
        """When the worker counts as unreachable, unless a status comes before. By the event loop's clock."""
        status = self._status
        busy = status is None or status.running_requests + status.waiting_requests
        if busy or self._interval_s <= SHORTEST_S:
            return self._heard_s + _STATUS_TIMEOUT_S
        idle_s = self._heard_s + self._interval_s + _IDLE_MARGIN_S
        if not self._routed_count:
            return idle_s
        return min(idle_s, max(self._heard_s, self._routed_since_s) + _STATUS_TIMEOUT_S)

    def wait_longer(self, seconds: float) -> None:
        """The event loop has stood still for so long. What the worker has sent meanwhile may wait to be read."""
        self._heard_s += seconds
        self._routed_since_s += seconds
        self._update_due()

    def _update_due(self) -> None:
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(self._due_s())

    def _close_if_unused(self) -> None:
        if self._retired and not self._requests and self._closing is None:
            self._closing = asyncio.create_task(self.close())


def _stall_of(status: worker_pb2.WatchStatusResponse) -> str:
    """The stall that a worker reports. Empty without one."""
    if not status.HasField("stall"):
        return ""
    stall = status.stall
    age_s, bound_s = seconds_from_duration(stall.age), seconds_from_duration(stall.bound)
    return (
        f"its engine has not stepped for {age_s:.0f} s, more than {bound_s:.1f} s, with {stall.request_count} requests "
        f"and a step of {stall.token_count} tokens"
    )
