"""The worker's side of one link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from opentelemetry import context as otel_context

from headrace.decode.v1 import decode_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import HeadraceError, InvalidRequest, ProtocolViolation, QueueFull
from headrace_common.limits import LINK_STREAMS_MAX, LINK_TOKEN_INTERVAL_MAX_US
from headrace_common.rpc.field_bounds import require_bounds
from headrace_common.rpc.status import reported_error, status_of
from headrace_common.rpc.trace_context import context_of_carrier
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.link.outgoing import LinkWriter, OutgoingStream, Write

_LAST_WRITE_S = 0.5
_NAME = "a request of Link"

StartAttempt = Callable[[decode_pb2.GenerateRequest, Deadline], Awaitable[DecodeAttempt]]


class LinkSession:
    """Runs the requests of one router."""

    def __init__(self, start: StartAttempt, write: Write, default_deadline_s: float) -> None:
        """`default_deadline_s` is the deadline of requests that have none."""
        self._start = start
        self._default_deadline_s = default_deadline_s
        self._starting: dict[int, asyncio.Task[None]] = {}
        """Of each request, what runs until the engine has it."""
        self._attempts: dict[int, DecodeAttempt] = {}
        """Those that have not ended, once they are admitted."""
        self._last_stream_id = 0
        self._writer = LinkWriter(write)
        self._outgoing = self._writer.outgoing

    async def run(self, requests: AsyncIterator[decode_pb2.LinkRequest]) -> None:
        """Serves the link until the router has closed it and all its requests have ended.

        Raises ProtocolViolation, or the error given to `end`. Every request ends with the link.
        """
        reader = asyncio.create_task(self._read(requests))
        writer = asyncio.create_task(self._writer.run())
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            reader.cancel()
            self._end_all()
            self._writer.stop()
            try:
                # gRPC sends no status while a message is being written.
                await asyncio.wait({writer}, timeout=_LAST_WRITE_S)
            finally:
                writer.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def end(self, refusal: HeadraceError) -> None:
        """Ends the link with `refusal` once the requests have ended and their events are sent."""
        self._writer.finish(refusal)

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
        self._writer.finish()

    def _set_interval(self, interval_us: int) -> None:
        if interval_us > LINK_TOKEN_INTERVAL_MAX_US:
            raise ProtocolViolation(
                f"token_interval_us must be at most {LINK_TOKEN_INTERVAL_MAX_US}, not {interval_us}",
                metadata={"field": "token_interval_us"},
            )
        self._writer.pace.set_interval(interval_us / 1e6)

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
        outgoing = self._outgoing.open(stream_id, opened.credit_tokens)
        if not opened.credit_tokens:
            self._end(outgoing, InvalidRequest({"credit_tokens": "must be 1 or more"}))
        elif full:
            what = f"the link has {LINK_STREAMS_MAX} requests in progress"
            self._end(outgoing, QueueFull(what, metadata={"streams": str(LINK_STREAMS_MAX)}))
        else:
            starting = asyncio.create_task(self._run(outgoing, opened))
            self._starting[stream_id] = starting
            starting.add_done_callback(lambda _: self._starting.pop(stream_id, None))

    async def _run(self, outgoing: OutgoingStream, opened: decode_pb2.LinkOpen) -> None:
        """Admits a request and starts it."""
        try:
            require_bounds(opened)
            otel_context.attach(context_of_carrier(opened.traceparent, opened.tracestate))
            attempt = await self._start(opened.request, self._deadline_of(opened))
            self._attempts[outgoing.stream_id] = attempt
            attempt.start(
                outgoing,
                partial(self._end, outgoing),
                partial(self._outgoing.add_receipt, outgoing.stream_id),
                early=opened.request.early_admission,
            )
        except Exception as error:  # noqa: BLE001 - the outermost frame of a request
            self._end(outgoing, error)

    def _deadline_of(self, opened: decode_pb2.LinkOpen) -> Deadline:
        if not opened.HasField("timeout"):
            return Deadline.after(self._default_deadline_s)
        return Deadline.after(seconds_from_duration(opened.timeout))

    def _cancel(self, stream_id: int) -> None:
        self._outgoing.drop(stream_id)
        if (starting := self._starting.get(stream_id)) is not None:
            starting.cancel()
        self._give_back(stream_id)

    def _end(self, outgoing: OutgoingStream, error: Exception | None = None) -> None:
        """The request has ended: with `error`, or with what `outgoing` has."""
        if error is not None:
            outgoing.fail(status_of(reported_error(error, _NAME)).SerializeToString())
        self._give_back(outgoing.stream_id)

    def _give_back(self, stream_id: int) -> None:
        if (attempt := self._attempts.pop(stream_id, None)) is not None:
            attempt.end()

    def _end_all(self) -> None:
        for starting in self._starting.values():
            starting.cancel()
        for stream_id in tuple(self._attempts):
            self._give_back(stream_id)
