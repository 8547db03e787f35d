"""The worker's side of one link."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from opentelemetry import context as otel_context

from headrace.decode.v1 import decode_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import HeadraceError, InvalidRequest, ProtocolViolation, QueueFull
from headrace_common.limits import (
    LINK_MESSAGE_BYTES_MAX,
    LINK_STREAMS_MAX,
    LINK_TOKEN_INTERVAL_MAX_US,
)
from headrace_common.process.pacing import GAP_MIN_S, JOIN_S
from headrace_common.rpc.field_bounds import require_bounds
from headrace_common.rpc.status import reported_error, status_of
from headrace_common.rpc.trace_context import context_of_carrier
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.link.outgoing import Outgoing, OutgoingStream


class TokenPace:
    """Lets tokens go at most once in the interval that the router asks for."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        """`on_due` is called when tokens that have waited may go."""
        self._on_due = on_due
        self.interval_s = 0.0
        self._due_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set_interval(self, interval_s: float) -> None:
        """Changes the interval, also for tokens that wait now."""
        if interval_s == self.interval_s:
            return
        self._due_s += interval_s - self.interval_s
        self.interval_s = interval_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._on_due()

    def try_release(self) -> bool:
        """Whether the tokens that wait may go now. If not, `on_due` will be called."""
        if self._timer is not None:
            return False
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if now_s < self._due_s:
            self._timer = loop.call_at(self._due_s, self._end_wait)
            return False
        self._due_s = now_s + self.interval_s
        return True

    def close(self) -> None:
        """Calls `on_due` no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_wait(self) -> None:
        self._timer = None
        # The timer may be early by less than the resolution of the loop's clock.
        self._due_s = -math.inf
        self._on_due()


_FLUSH_S = 2.0
_LAST_WRITE_S = 0.5
_NAME = "a request of Link"

StartAttempt = Callable[[decode_pb2.GenerateRequest, Deadline], Awaitable[DecodeAttempt]]
Write = Callable[[decode_pb2.LinkResponse], Awaitable[Any]]


class _Lane:
    """One request from its open to its end. `attempt` is set once it is admitted."""

    def __init__(self, outgoing: OutgoingStream) -> None:
        self.outgoing = outgoing
        self.stream_id = outgoing.stream_id
        self.attempt: DecodeAttempt | None = None
        self.starting: asyncio.Task[None] | None = None
        """Runs until the engine has the request."""

    def start(self, starting: asyncio.Task[None]) -> None:
        self.starting = starting

    def admitted(self, attempt: DecodeAttempt) -> None:
        self.attempt = attempt

    def end(self) -> None:
        """Gives back what the request holds."""
        if self.starting is not None:
            self.starting.cancel()
        if self.attempt is not None:
            self.attempt.end()


class LinkSession:
    """Runs the requests of one router. Sends the events of all requests together, once in a turn of the event loop.

    While a message is written, events gather for the next one, and for `JOIN_S` where the router is busy. Tokens after
    the first ones of a request also wait for the interval that the router asks for.
    """

    def __init__(self, start: StartAttempt, write: Write, default_deadline_s: float) -> None:
        """`default_deadline_s` is the deadline of requests that have none."""
        self._start = start
        self._write = write
        self._default_deadline_s = default_deadline_s
        self._lanes: dict[int, _Lane] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._last_stream_id = 0
        self._wake = asyncio.Event()
        self._outgoing = Outgoing(LINK_MESSAGE_BYTES_MAX, self._wake.set)
        self._pace = TokenPace(self._wake.set)
        self._finishing = False
        self._stopping = False
        self._refusal: HeadraceError | None = None

    async def run(self, requests: AsyncIterator[decode_pb2.LinkRequest]) -> None:
        """Serves the link until the router has closed it and all its requests have ended.

        Raises ProtocolViolation, or the error given to `end`. Every request ends with the link.
        """
        reader = asyncio.create_task(self._read(requests))
        writer = asyncio.create_task(self._send_events())
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            reader.cancel()
            self._pace.close()
            self._end_all()
            await self._stop_writer(writer)
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _stop_writer(self, writer: asyncio.Task[None]) -> None:
        """gRPC sends no status while a message is being written."""
        self._stopping = True
        self._wake.set()
        try:
            await asyncio.wait({writer}, timeout=_LAST_WRITE_S)
        finally:
            writer.cancel()

    def end(self, refusal: HeadraceError) -> None:
        """Ends the link with `refusal` once the requests have ended and their events are sent."""
        self._refusal = refusal
        self._finish()

    async def _read(self, requests: AsyncIterator[decode_pb2.LinkRequest]) -> None:
        async for request in requests:
            for opened in request.opens:
                self._open(opened)
            for credit in request.credits:
                self._outgoing.grant(credit.stream_id, credit.credit_tokens)
            for stream_id in request.cancelled_stream_ids:
                self._cancel(stream_id)
            if request.HasField("token_interval_us"):
                self._set_interval(request.token_interval_us)
            self._wake.set()
        self._finish()

    def _set_interval(self, interval_us: int) -> None:
        if interval_us > LINK_TOKEN_INTERVAL_MAX_US:
            raise ProtocolViolation(
                f"token_interval_us must be at most {LINK_TOKEN_INTERVAL_MAX_US}, not {interval_us}",
                metadata={"field": "token_interval_us"},
            )
        self._pace.set_interval(interval_us / 1e6)

    def _finish(self) -> None:
        self._finishing = True
        self._wake.set()

    def _open(self, opened: decode_pb2.LinkOpen) -> None:
        stream_id = opened.stream_id
        if stream_id <= self._last_stream_id:
            raise ProtocolViolation(
                f"stream id {stream_id} is not above {self._last_stream_id}, which is in use or was",
                metadata={"stream_id": str(stream_id)},
            )
        self._last_stream_id = stream_id
        full = self._outgoing.count >= LINK_STREAMS_MAX
        if self._outgoing.count >= 2 * LINK_STREAMS_MAX:
            # Even the refusals are bounded.
            raise ProtocolViolation(
                "the router opens requests that were refused, and reads no refusal"
            )
        lane = self._lanes[stream_id] = _Lane(self._outgoing.open(stream_id, opened.credit_tokens))
        if not opened.credit_tokens:
            self._end_lane(lane, InvalidRequest({"credit_tokens": "must be 1 or more"}))
        elif full:
            self._end_lane(lane, _link_full())
        else:
            starting = asyncio.create_task(self._run(lane, opened))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)
            lane.start(starting)

    async def _run(self, lane: _Lane, opened: decode_pb2.LinkOpen) -> None:
        """Admits a request and starts it."""
        try:
            require_bounds(opened)
            otel_context.attach(context_of_carrier(opened.traceparent, opened.tracestate))
            attempt = await self._start(opened.request, self._deadline_of(opened))
            lane.admitted(attempt)
            attempt.report_cost(partial(self._outgoing.add_receipt, lane.stream_id))
            on_end = partial(self._end_lane, lane)
            attempt.start(lane.outgoing, on_end, early=opened.request.early_admission)
        except Exception as error:  # noqa: BLE001 - the outermost frame of a request
            self._end_lane(lane, error)

    def _deadline_of(self, opened: decode_pb2.LinkOpen) -> Deadline:
        if not opened.HasField("timeout"):
            return Deadline.after(self._default_deadline_s)
        return Deadline.after(seconds_from_duration(opened.timeout))

    def _cancel(self, stream_id: int) -> None:
        self._outgoing.drop(stream_id)
        lane = self._lanes.pop(stream_id, None)
        if lane is not None:
            lane.end()

    def _end_lane(self, lane: _Lane, error: Exception | None = None) -> None:
        """The request has ended: with `error`, or with what `lane.outgoing` has."""
        if error is not None:
            lane.outgoing.fail(status_of(reported_error(error, _NAME)).SerializeToString())
        self._lanes.pop(lane.stream_id, None)
        if lane.attempt is not None:
            lane.attempt.end()

    def _end_all(self) -> None:
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.end()

    async def _send_events(self) -> None:
        """Returns or raises `_refusal` once the link is finishing and nothing is left to send."""
        while True:
            await self._wake.wait()
            if self._pace.interval_s > GAP_MIN_S:
                # Each message costs a busy router more than all that is in it.
                await asyncio.sleep(JOIN_S)
            self._wake.clear()
            while not self._stopping and (message := self._next_message()) is not None:
                await self._write(message)
            if self._stopping:
                return
            if self._finishing and not self._outgoing.count:
                if self._refusal is not None:
                    raise self._refusal
                return

    def _next_message(self) -> decode_pb2.LinkResponse | None:
        outgoing = self._outgoing
        holds_tokens = outgoing.has_waiting and not self._pace.try_release()
        return outgoing.next_message(holds_tokens=holds_tokens)


class LinkSessions:
    """The links of a worker."""

    def __init__(self) -> None:
        self._sessions: set[LinkSession] = set()
        self._none_left = asyncio.Event()

    @contextmanager
    def listed(self, session: LinkSession) -> Iterator[None]:
        """In this context, `end` ends the session."""
        self._sessions.add(session)
        try:
            yield
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._none_left.set()

    async def end(self, refusal: Callable[[], HeadraceError]) -> None:
        """Ends every link with an error of its own, and waits briefly for what they have to send."""
        self._none_left.clear()
        for session in self._sessions:
            session.end(refusal())
        if not self._sessions:
            return
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self._none_left.wait()
        except TimeoutError:
            # A router does not read. The server ends the link next.
            return


def _link_full() -> QueueFull:
    return QueueFull(
        f"the link has {LINK_STREAMS_MAX} requests in progress",
        metadata={"streams": str(LINK_STREAMS_MAX)},
    )
