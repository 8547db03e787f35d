"""The response to one request: coalesces tokens and their text into messages.

The dispatcher adds tokens. Messages leave through an outlet, which sends at once, or through a reader. Tokens that
arrive while a message is written, or within the stream's minimum gap between two messages, share the next message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2
from headrace_common.latency.clocks import clocks_now
from headrace_common.process.pacing import FlushPace, LoopLoad
from headrace_common.telemetry.metrics.instruments import BucketCounts
from headrace_frontend.request.completion_text import PendingTokens, PromptLogprobs
from headrace_frontend.request.validation import PreparedRequest
from headrace_kv.layout import WorkerRef

PENDING_TOKENS_MAX = 1_024
_LONGEST_MAX = 8


class Outlet(Protocol):
    """Sends to the client at once, without a turn of the event loop."""

    @property
    def writable(self) -> bool:
        """Whether the client can take a message now."""
        ...

    def write_message(self, message: inference_pb2.GenerateResponse) -> None:
        """Sends a message that is not the last one. Only while `writable`."""
        ...

    def write_text(self, text: str) -> bool:
        """The same for a message with nothing but this text, after the first one.

        False, and nothing is sent, unless it is `writable` and the client needs nothing but the text.
        """
        ...


class NewTokens(Protocol):
    """Tokens of one request. Each has an entry of logprobs if those were requested."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens."""
        ...

    @property
    def logprobs(self) -> Sequence[sampling_pb2.TokenLogprobs]:
        """The logprobs."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[sampling_pb2.TokenLogprobs]:
        """Those of the prompt, with the first tokens."""
        ...


class LongestTimes:
    """The longest of many times, at most 8, of more than 20 ms each."""

    __slots__ = ("_found", "least_ns")

    def __init__(self) -> None:
        self.least_ns = 20_000_000
        """A time that is not longer is not kept."""
        self._found: list[tuple[int, int]] = []

    def add(self, time_ns: int, end_unix_ns: int) -> None:
        """Keeps a time, in place of the shortest when there are too many."""
        if time_ns > self.least_ns:
            heappush(self._found, (time_ns, end_unix_ns))
        if len(self._found) > _LONGEST_MAX:
            heappop(self._found)
            self.least_ns = self._found[0][0]

    def intervals(self, longer_than_ns: float = 0) -> list[tuple[int, int]]:
        """The start and the end of each, in Unix nanoseconds, the earliest first."""
        return sorted((end - time, end) for time, end in self._found if time > longer_than_ns)


class ResponseTimes:
    """When the tokens of a response have arrived, in Unix nanoseconds; 0 before that.

    All are the wall clock of the response's start, continued by the monotonic clock: a clock that is set changes no
    duration.
    """

    def __init__(self, gaps: BucketCounts | None = None) -> None:
        """`gaps` counts the seconds between two batches of tokens."""
        self._start_unix_ns, self._start_ns, _ = clocks_now()
        self.gaps = gaps
        self.first_token_unix_ns = 0
        self.second_token_unix_ns = 0
        """Arrival of the second batch of tokens. A fast decode worker sends several tokens in a batch."""
        self.last_token_unix_ns = 0
        self.first_message_unix_ns = 0
        self.finished_unix_ns = 0
        """The end of a response without an error, before the client has all of it."""
        self.longest_gaps = LongestTimes()
        """Times without tokens after the first one."""
        self.client_waits = LongestTimes()
        """Times in which too many tokens were not sent yet for another to be added."""

    def now_unix_ns(self) -> int:
        """The time now."""
        return self._start_unix_ns + time.monotonic_ns() - self._start_ns

    def monotonic_us(self, unix_ns: int) -> int:
        """Microseconds of the monotonic clock at a time of this response."""
        return (unix_ns - self._start_unix_ns + self._start_ns) // 1_000

    def first_message_made(self) -> None:
        """The message with the first token is made."""
        self.first_message_unix_ns = self.now_unix_ns()

    def finished(self) -> None:
        """The response has ended without an error."""
        self.finished_unix_ns = self.now_unix_ns()

    def tokens_arrived(self, now_ns: int) -> None:
        """A batch of tokens has arrived at this time of the monotonic clock."""
        now_unix_ns = self._start_unix_ns + now_ns - self._start_ns
        if not self.first_token_unix_ns:
            self.first_token_unix_ns = now_unix_ns
        elif not self.second_token_unix_ns:
            self.second_token_unix_ns = now_unix_ns
        if self.last_token_unix_ns:
            gap_ns = now_unix_ns - self.last_token_unix_ns
            if self.gaps is not None:
                self.gaps.record(1e-9 * gap_ns)
            if gap_ns > self.longest_gaps.least_ns:
                self.longest_gaps.add(gap_ns, now_unix_ns)
        self.last_token_unix_ns = now_unix_ns


class ResponseStream:
    """The response to one request, over all its attempts.

    An attempt adds tokens after those of earlier attempts, and after those that the client sent with its request.
    """

    def __init__(
        self,
        request: PreparedRequest,
        trace_id: str,
        load: LoopLoad | None = None,
        *,
        paced: bool = False,
        gaps: BucketCounts | None = None,
        on_first_message: Callable[[], None] = lambda: None,
    ) -> None:
        """`paced`: see FlushPace. `gaps`: see ResponseTimes. `on_first_message` is called before that is sent."""
        self.request = request
        self.trace_id = trace_id
        """The trace of the request, as 32 hex characters."""
        self.times = ResponseTimes(gaps)
        self._pending = PendingTokens(request)
        self._prompt = PromptLogprobs(request)
        self._has_logprobs = request.sampling.HasField("logprobs") or self._prompt.awaited
        self._last_message: inference_pb2.GenerateResponse | None = None
        self._error: Exception | None = None
        self._ended = False
        self._on_first_message = on_first_message
        self._sent_first_message = False
        self._readable = asyncio.Event()
        self._outlet: Outlet | None = None
        """None while a reader gets all messages."""
        self._need_reader: Callable[[], None] | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        """Runs until the next message may be sent, while tokens for it are pending."""
        self._drained: asyncio.Event | None = None
        """Set by the next message, while tokens wait for that."""
        self._pace = FlushPace(load or LoopLoad(), paced=paced)
        self.finish_reason: sampling_pb2.FinishReason.ValueType = (
            sampling_pb2.FINISH_REASON_UNSPECIFIED
        )
        self.first_token_by = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
        """How the first token was generated."""
        self.decode_worker: WorkerRef | None = None
        """The decode worker of the latest attempt."""
        self.usage: inference_pb2.Usage | None = None
        """The usage of a response that has ended without an error."""

    @property
    def new_tokens(self) -> int:
        """The number of tokens that attempts have added."""
        return len(self._pending.generated) - len(self.request.generated)

    @property
    def started(self) -> bool:
        """Whether an attempt has added a token."""
        return self.new_tokens > 0

    @property
    def kv_is_on_decode(self) -> bool:
        """Whether a decode worker has generated a token from the KV cache of the whole prompt."""
        if self.first_token_by == first_token_pb2.FIRST_TOKEN_POLICY_DECODE:
            return self.started
        return self.times.second_token_unix_ns > 0

    @property
    def generated(self) -> tuple[int, ...]:
        """All tokens of the completion so far. The next attempt continues after them."""
        return tuple(self._pending.generated)

    @property
    def completion_tokens(self) -> int:
        """The number of tokens of the completion so far."""
        return len(self._pending.generated)

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete. Tokens added after that are ignored."""
        return self._pending.stopped

    @property
    def ended_by(self) -> sampling_pb2.FinishReason.ValueType:
        """Why no token can follow. Unspecified while one can."""
        if self.stopped:
            return sampling_pb2.FINISH_REASON_STOP
        return ended_by(self.request, self._pending.generated)

    def attempt_started(self, decode_worker: WorkerRef) -> None:
        """An attempt adds its tokens from now on."""
        self.decode_worker = decode_worker

    def use_outlet(self, outlet: Outlet, need_reader: Callable[[], None]) -> None:
        """Sends all messages but the last through `outlet` while the client takes them at once.

        `need_reader` is called at most once: from now on `next_message` must be called for all that is left.
        """
        self._outlet, self._need_reader = outlet, need_reader

    def stop_sending(self) -> None:
        """Sends nothing from now on by itself. Refers to no outlet and no caller any more."""
        self._outlet = self._need_reader = None
        self._stop_timer()

    async def add_first_tokens(
        self, tokens: NewTokens, maker: first_token_pb2.FirstTokenPolicy.ValueType
    ) -> None:
        """As `add_tokens`, for a first token that `maker` generated before decode had the KV cache.

        More tokens may follow it in the same batch.
        """
        self.first_token_by = maker
        await self.add_tokens(tokens)

    async def add_tokens(self, tokens: NewTokens) -> None:
        """Adds tokens from a worker. Waits while more than PENDING_TOKENS_MAX tokens are not sent yet.

        Raises ProtocolViolation for first tokens without the prompt's logprobs, if those were requested.
        """
        if self._prompt.awaited and tokens.token_ids:
            self._prompt.put(tokens.prompt_logprobs)
        self.take_tokens(tokens.token_ids, tokens.logprobs)
        while len(self._pending.token_ids) > PENDING_TOKENS_MAX:
            self._drained, start_unix_ns = asyncio.Event(), self.times.now_unix_ns()
            try:
                await self._drained.wait()
            finally:
                end_unix_ns = self.times.now_unix_ns()
                self.times.client_waits.add(end_unix_ns - start_unix_ns, end_unix_ns)

    def take_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprobs]
    ) -> bool:
        """As `add_tokens`, without waiting. False when there is no room for more now, or the response has stopped."""
        pending = self._pending
        if token_ids and not pending.stopped:
            now_ns = time.monotonic_ns()
            self.times.tokens_arrived(now_ns)
            pending.add(token_ids, logprobs)
            if self._flush_timer is None:
                wait_s = self._pace.due_s - 1e-9 * now_ns
                if wait_s > 0:
                    loop = asyncio.get_running_loop()
                    self._flush_timer = loop.call_later(wait_s, self._flush_late)
                else:
                    self._flush()
        return not pending.stopped and len(pending.token_ids) <= PENDING_TOKENS_MAX

    def finish(
        self,
        reason: sampling_pb2.FinishReason.ValueType,
        usage: inference_pb2.Usage,
        timing: inference_pb2.Timing,
    ) -> None:
        """Ends the response. The next message is the last."""
        self.usage = usage
        self.times.finished()
        self._pending.finish()
        self.finish_reason = sampling_pb2.FINISH_REASON_STOP if self.stopped else reason
        self._last_message = inference_pb2.GenerateResponse(
            finish_reason=self.finish_reason,
            usage=usage,
            timing=timing,
            stop_text=self._pending.stopped_by,
        )
        self._end()

    def fail(self, error: Exception) -> None:
        """Ends the response with an error. `next_message` raises it after the tokens that arrived before."""
        self._error = error
        self._end()

    async def next_message(self) -> inference_pb2.GenerateResponse | None:
        """The next message, with all tokens that have arrived. None after the last message.

        Raises the error with which the response failed.
        """
        while True:
            await self._readable.wait()
            if self._prompt.pending:
                # A reader lets others run between the parts of a prompt.
                await asyncio.sleep(0)
            if self._pending.token_ids or self._last_message is not None:
                return self._build_message()
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._readable.clear()

    def _end(self) -> None:
        """The next message is the last, or the error. It does not wait for the gap between messages."""
        self._ended = True
        self._stop_timer()
        self._readable.set()

    def _stop_timer(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None

    def _flush_late(self) -> None:
        self._flush_timer = None
        try:
            self._flush()
        # `next_message` raises it.
        except Exception as error:  # noqa: BLE001
            self.fail(error)
            self._use_reader()

    def _flush(self) -> None:
        """Sends what is pending, or lets the reader do so."""
        outlet, pending = self._outlet, self._pending
        if outlet is None:
            self._readable.set()
        elif (
            self._sent_first_message
            and not self._has_logprobs
            and not pending.stopped
            and outlet.write_text(pending.text)
        ):
            pending.clear()
            self._record_flush()
        elif self._prompt.pending or not outlet.writable:
            self._use_reader()
        else:
            outlet.write_message(self._build_message())

    def _use_reader(self) -> None:
        need_reader, self._outlet, self._need_reader = self._need_reader, None, None
        self._readable.set()
        if need_reader is not None:
            need_reader()

    def _build_message(self) -> inference_pb2.GenerateResponse:
        if self._prompt.pending:
            message = inference_pb2.GenerateResponse()
            self._prompt.fill(message)
        else:
            message = self._last_message or inference_pb2.GenerateResponse()
            self._pending.fill(message)
            self._last_message = None
            if not self._ended:
                self._readable.clear()
            self._record_flush()
        message.request_id = self.request.request_id
        if not self._sent_first_message:
            message.trace_id = self.trace_id
            self._sent_first_message = True
            self.times.first_message_made()
            self._on_first_message()
        return message

    def _record_flush(self) -> None:
        if self._drained is not None:
            self._drained.set()
        self._pace.record_flush(time.monotonic())


def ended_by(
    request: PreparedRequest, generated: Sequence[int]
) -> sampling_pb2.FinishReason.ValueType:
    """Why no token can follow the generated ones, apart from stop strings. Unspecified while one can."""
    if generated and generated[-1] in request.stop_token_ids:
        return sampling_pb2.FINISH_REASON_STOP
    if len(generated) >= request.sampling.max_tokens:
        return sampling_pb2.FINISH_REASON_LENGTH
    return sampling_pb2.FINISH_REASON_UNSPECIFIED
