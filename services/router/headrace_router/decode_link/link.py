"""The router's side of one link to a decode worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
from opentelemetry.context import Context

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import inference_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    ProtocolViolation,
    WorkerGone,
)
from headrace_common.limits import LINK_MESSAGE_BYTES_MAX
from headrace_common.process.pacing import LoopLoad
from headrace_common.rpc.status import error_from_rpc
from headrace_common.rpc.trace_context import carrier_of
from headrace_router.decode_link.answer import LinkedAnswer, LinkedAnswers
from headrace_router.decode_link.outgoing import OutgoingRequests

_LOG = logging.getLogger(__name__)

WINDOW_TOKENS: Final = 512
"""Tokens of one request that the worker may send before the router has used some of them."""

_Failure = Callable[[], HeadraceError]
# CANCELLED is not this router's: a link that it cancels itself raises CancelledError.
_BROKEN: Final = frozenset({grpc.StatusCode.INTERNAL.name, grpc.StatusCode.CANCELLED.name})
_CANCELLED: Final = {"grpc_code": grpc.StatusCode.CANCELLED.name}


class DecodeLink:
    """One stream for many requests. It begins at once, and ends with `close` or when it breaks.

    `on_end` is called once it has ended. All its requests have failed by then. The worker joins tokens for as long as
    messages to clients do by `load`.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        on_end: Callable[[DecodeLink], None],
        load: LoopLoad,
    ) -> None:
        self.ended = False
        self._on_end = on_end
        self._load = load
        self._answers = LinkedAnswers()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._outgoing = OutgoingRequests(LINK_MESSAGE_BYTES_MAX)
        self._wake = asyncio.Event()
        self._last_stream_id = 0
        self._started_s = time.monotonic()
        self._retired = False
        self._failure: _Failure = _closed_here
        self._task = asyncio.create_task(self._run(channel))
        self._task.add_done_callback(self._finish)

    @property
    def count(self) -> int:
        """Requests in progress."""
        return self._answers.count

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started_s

    def open(
        self,
        request: decode_pb2.GenerateRequest,
        token_ids: inference_pb2.TokenIds,
        deadline: Deadline,
        context: Context,
    ) -> LinkedAnswer:
        """Sends a request, with these tokens. `context` is that of the caller's span.

        The caller must end it by `release`.
        """
        self._last_stream_id += 1
        stream_id = self._last_stream_id
        remaining_s = deadline.remaining_s()
        carrier = carrier_of(context)
        self._outgoing.open(
            decode_pb2.LinkOpen(
                stream_id=stream_id,
                request=request,
                timeout=duration_from_seconds(remaining_s),
                traceparent=carrier.get("traceparent", ""),
                tracestate=carrier.get("tracestate", ""),
                credit_tokens=WINDOW_TOKENS,
            ),
            token_ids,
        )
        self._outgoing.set_token_interval(self._token_interval_us)
        self._wake.set()
        answer = LinkedAnswer(stream_id, WINDOW_TOKENS, self._grant)
        self._answers.add(answer)
        self._timers[stream_id] = asyncio.get_running_loop().call_later(
            remaining_s, lambda: answer.fail(DeadlineExceeded("the deadline passed"))
        )
        return answer

    def release(self, answer: LinkedAnswer) -> None:
        """The caller reads no more. Cancels the request unless it has ended. Repeats are ignored."""
        self._stop_timer(answer.stream_id)
        if self._answers.remove(answer.stream_id) is not None:
            self._outgoing.cancel(answer.stream_id)
            self._wake.set()
            self._close_if_unused()

    def retire(self) -> None:
        """Ends the link once its requests have ended. The caller opens no more."""
        self._retired = True
        self._close_if_unused()

    def fail(self, failure: Callable[[], HeadraceError]) -> None:
        """Ends the link with errors that `failure` makes, one for each request. The worker ends the requests."""
        if not self.ended:
            self._failure = failure
            self._task.cancel()

    async def close(self) -> None:
        """Ends the link at once."""
        self._task.cancel()
        await asyncio.wait({self._task})

    def _close_if_unused(self) -> None:
        if self._retired and not self._answers.count:
            self._task.cancel()

    @property
    def _token_interval_us(self) -> int:
        return round(1e6 * self._load.gap_s)

    def _grant(self, stream_id: int, credit_tokens: int) -> None:
        if stream_id in self._answers:
            self._outgoing.grant(stream_id, credit_tokens)
            self._wake.set()

    def _stop_timer(self, stream_id: int) -> None:
        timer = self._timers.pop(stream_id, None)
        if timer is not None:
            timer.cancel()

    async def _run(self, channel: grpc.aio.Channel) -> None:
        call: Any = decode_pb2_grpc.DecodeServiceStub(channel).Link()
        writer = asyncio.create_task(self._send(call))
        try:
            self._failure = await self._receive_all(call)
        finally:
            writer.cancel()
            call.cancel()

    def _finish(self, task: asyncio.Task[None]) -> None:
        bug = None if task.cancelled() else task.exception()
        if bug is not None:
            _LOG.error("the link to a decode worker met a bug", exc_info=bug)
            self._failure = _bug
        self.ended = True
        for timer in self._timers.values():
            timer.cancel()
        self._answers.fail_all(self._failure)
        self._on_end(self)

    async def _send(self, call: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while (message := self._outgoing.next_message()) is not None:
                    await call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            # The call has ended. Its reader reports why.
            return
        finally:
            call.cancel()

    async def _receive_all(self, call: Any) -> _Failure:
        """Returns when the link has ended: what makes the error of each request that is left."""
        while True:
            try:
                response = await call.read()
                if response is grpc.aio.EOF:
                    return lambda: WorkerGone("it ended its link too early")
                for stream_id in self._answers.receive(response):
                    self._stop_timer(stream_id)
                if self._outgoing.set_token_interval(self._token_interval_us):
                    self._wake.set()
                self._close_if_unused()
            except grpc.aio.AioRpcError as error:
                broken = error
                return lambda: _failure_of(broken)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The writer was the first to find the link broken.
                return lambda: WorkerGone("its link broke", metadata=_CANCELLED)
            except ProtocolViolation as error:
                detail = error.detail
                return lambda: ProtocolViolation(detail)


def _failure_of(error: grpc.aio.AioRpcError) -> HeadraceError:
    """A connection that ends during a write gives the link a status of gRPC, without the details of a worker."""
    known = error_from_rpc(error)
    if known.metadata.get("grpc_code") in _BROKEN:
        return WorkerGone(f"its link broke: {known.detail}", metadata=known.metadata)
    return known


def _closed_here() -> HeadraceError:
    return Cancelled("this router closed its link to the worker")


def _bug() -> HeadraceError:
    return InternalError("the link to the worker met a bug; the router's log has it")
