"""The router's side of one link to a decode worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import grpc.aio
from opentelemetry.context import Context

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
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
from headrace_common.rpc.status import error_from_rpc, error_from_status
from headrace_common.rpc.trace_context import carrier_of
from headrace_router.decode_link.answer import LinkedAnswer
from headrace_router.decode_link.outgoing import OutgoingRequests

_LOG = logging.getLogger(__name__)

WINDOW_TOKENS: Final = 512
"""Tokens of one request that the worker may send before the router has used some of them."""

_Failure = Callable[[], HeadraceError]


class DecodeLink:
    """One stream for many requests. It begins at once, and ends with `close` or when it breaks.

    `on_end` is called once it has ended. All its requests have failed by then.
    """

    def __init__(self, channel: grpc.aio.Channel, on_end: Callable[[DecodeLink], None]) -> None:
        self.ended = False
        self._on_end = on_end
        self._answers: dict[int, LinkedAnswer] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._outgoing = OutgoingRequests(LINK_MESSAGE_BYTES_MAX)
        self._wake = asyncio.Event()
        self._last_stream_id = 0
        self._started_s = time.monotonic()
        self._retired = False
        self._task = asyncio.create_task(self._run(channel))

    @property
    def count(self) -> int:
        """Requests in progress."""
        return len(self._answers)

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started_s

    def open(
        self, request: decode_pb2.GenerateRequest, deadline: Deadline, context: Context
    ) -> LinkedAnswer:
        """Sends a request. `context` is that of the caller's span. The caller must end it by `release`."""
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
            )
        )
        self._wake.set()
        answer = self._answers[stream_id] = LinkedAnswer(stream_id, WINDOW_TOKENS, self._grant)
        self._timers[stream_id] = asyncio.get_running_loop().call_later(
            remaining_s, lambda: answer.fail(DeadlineExceeded("the deadline passed"))
        )
        return answer

    def release(self, answer: LinkedAnswer) -> None:
        """The caller reads no more. Cancels the request unless it has ended. Repeats are ignored."""
        if self._forget(answer.stream_id) is not None:
            self._outgoing.cancel(answer.stream_id)
            self._wake.set()
            self._close_if_unused()

    def retire(self) -> None:
        """Ends the link once its requests have ended. The caller opens no more."""
        self._retired = True
        self._close_if_unused()

    async def close(self) -> None:
        """Ends the link at once."""
        self._task.cancel()
        await asyncio.wait({self._task})

    def _close_if_unused(self) -> None:
        if self._retired and not self._answers:
            self._task.cancel()

    def _grant(self, stream_id: int, credit_tokens: int) -> None:
        if stream_id in self._answers:
            self._outgoing.grant(stream_id, credit_tokens)
            self._wake.set()

    def _forget(self, stream_id: int) -> LinkedAnswer | None:
        """None when the request has ended."""
        timer = self._timers.pop(stream_id, None)
        if timer is not None:
            timer.cancel()
        return self._answers.pop(stream_id, None)

    async def _run(self, channel: grpc.aio.Channel) -> None:
        failure: _Failure = _closed_here
        tasks: list[asyncio.Task[None]] = []
        call: Any = None
        try:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Link()
            tasks.append(asyncio.create_task(self._send(call)))
            failure = await self._receive_all(call)
        except Exception:
            _LOG.exception("a link to a decode worker met a bug")
            failure = _bug
            raise
        finally:
            self.ended = True
            for task in tasks:
                task.cancel()
            if call is not None:
                call.cancel()
            for stream_id in tuple(self._answers):
                self._fail(stream_id, failure())
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
                self._receive(response)
            except grpc.aio.AioRpcError as error:
                broken = error
                return lambda: error_from_rpc(broken)
            except ProtocolViolation as error:
                detail = error.detail
                return lambda: ProtocolViolation(detail)

    def _receive(self, response: decode_pb2.LinkResponse) -> None:
        """Passes on all events of a message. Ignores requests that have ended here."""
        answers = self._answers
        for reserved in response.reserved:
            answer = answers.get(reserved.stream_id)
            if answer is not None:
                answer.reserve(reserved.reserved)
        if response.HasField("tokens"):
            self._receive_columns(response.tokens)
        for one in response.tokens_with_logprobs:
            answer = answers.get(one.stream_id)
            if answer is not None:
                answer.add_tokens(one.tokens.token_ids, one.tokens.logprobs)
        for finished in response.finished:
            answer = self._forget(finished.stream_id)
            if answer is not None:
                answer.finish(finished.finished)
        for failure in response.failures:
            self._fail(failure.stream_id, error_from_status(failure.status))
        if self._retired:
            self._close_if_unused()

    def _receive_columns(self, tokens: decode_pb2.LinkTokens) -> None:
        token_ids = list(tokens.token_ids)
        answers = self._answers
        if len(tokens.stream_ids) != len(tokens.token_counts):
            raise ProtocolViolation("the worker sent columns of tokens that differ in length")
        start = 0
        for stream_id, count in zip(tokens.stream_ids, tokens.token_counts, strict=True):
            answer = answers.get(stream_id)
            if answer is not None:
                answer.add_tokens(token_ids[start : start + count])
            start += count
        if start != len(token_ids):
            raise ProtocolViolation("the worker sent more or fewer tokens than it counted")

    def _fail(self, stream_id: int, error: HeadraceError) -> None:
        answer = self._forget(stream_id)
        if answer is not None:
            answer.fail(error)


def _closed_here() -> HeadraceError:
    return Cancelled("this router closed its link to the worker")


def _bug() -> HeadraceError:
    return InternalError("the link to the worker met a bug; the router's log has it")
