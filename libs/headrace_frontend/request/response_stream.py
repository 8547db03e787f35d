"""The response to one request: coalesces tokens and their text into messages.

The dispatcher adds tokens. Messages leave through an outlet, which sends at once, or through a reader. Tokens that
arrive while a message is written, or within the stream's minimum gap between two messages, share the next message.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from heapq import heappop, heappush
from typing import Final, Protocol, TypeAlias

from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2
from headrace_common.errors import DeadlineExceeded
from headrace_common.process.pacing import LoopLoad
from headrace_common.tasks import end_task
from headrace_common.telemetry.metrics.instruments import BucketCounts
from headrace_frontend.request.completion_text import (
    CompletionText,
    PromptLogprobs,
    wants_prompt_logprobs,
)
from headrace_frontend.request.validation import PreparedRequest
from headrace_kv.layout import WorkerRef

PENDING_TOKENS_MAX = 1_024
_PACED_SHARE: Final = 0.5
_LONGEST_MAX: Final = 8


ResponseWriter: TypeAlias = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]
"""Sends one message to the client. It returns when the client can take another."""


class Outlet(Protocol):
    """Sends to the client at once, without a turn of the event loop."""

    @property
    def writable(self) -> bool:
        """Whether the client can take a message now."""

    def write_message(self, message: inference_pb2.GenerateResponse) -> None:
        """Sends a message that is not the last one. Only while `writable`."""

    def write_text(self, text: str) -> bool:
        """The same for a message with nothing but this text, after the first one.

        False, and nothing is sent, unless it is `writable` and the client needs nothing but the text.
        """


class LongestTimes:
    """The longest of many times, at most 8, of more than 20 ms each."""

    least_ns = 20_000_000
    """A time that is not longer is not kept."""
    _found: list[tuple[int, int]] | None = None

    def add(self, time_ns: int, end_ns: int) -> None:
        """Keeps a time, in place of the shortest when there are too many."""
        found = self._found = self._found or []
        if time_ns > self.least_ns:
            heappush(found, (time_ns, end_ns))
        if len(found) > _LONGEST_MAX:
            heappop(found)
            self.least_ns = found[0][0]

    def intervals(self) -> list[tuple[int, int]]:
        """The start and the end of each by the monotonic clock, the earliest first."""
        return sorted([(end - time, end) for time, end in self._found or ()])


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
        """`paced`: workers join tokens already, once in each gap of `load`. `gaps` counts the seconds between batches.

        `on_first_message` is called before that is sent.
        """
        self.request = request
        self.trace_id = trace_id
        """The trace of the request, as 32 hex characters."""
        self.gaps = gaps
        self.first_token_ns = 0
        """Arrival of the first tokens by the monotonic clock, as the next three. 0 before it."""
        self.second_token_ns = 0
        """Of the second batch of tokens. A fast decode worker sends several tokens in a batch."""
        self.last_token_ns = 0
        self.first_message_ns = 0
        """When the message with the first token was made."""
        self.finished_ns = 0
        """When the response was complete, before the client has all of it."""
        self.longest_gaps = LongestTimes()
        """Times without tokens after the first one."""
        self.client_waits = LongestTimes()
        """Times in which too many tokens were not sent yet for another to be added."""
        self._waits_since_ns = 0
        self.stopped = False
        """Whether a stop string is complete. Tokens added after that are ignored."""
        self._text = CompletionText(request)
        self._generated = list(request.generated)
        """All tokens of the completion so far."""
        self._sent = self._converted = len(self._generated)
        """How many of them are in messages, and how many have their text in messages or in `_parts`."""
        self._parts: list[str] = []
        self._logprobs: list[sampling_pb2.TokenLogprobs] = []
        """Of the tokens that are in no message, if they were requested."""
        if request.generated:
            self._text.replay(self._generated)
            self.stopped = self._text.stopped
        self._prompt = PromptLogprobs(request) if wants_prompt_logprobs(request) else None
        self._needs_messages = self._prompt is not None or request.sampling.HasField("logprobs")
        self._last_message: inference_pb2.GenerateResponse | None = None
        self._error: Exception | None = None
        self._ended = False
        self._on_first_message = on_first_message
        self._readable = asyncio.Event()
        self._outlet: Outlet | None = None
        """None while a reader gets all messages."""
        self._need_reader: Callable[[], None] | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        """Runs until the next message may be sent, while tokens for it are pending."""
        self.full = False
        """Whether more than PENDING_TOKENS_MAX tokens are in no message."""
        self._on_stopped: Callable[[], None] = _nothing
        self._on_drained: Callable[[], None] = _nothing
        self._load = load or LoopLoad()
        # Half a gap is enough for tokens that come once in each gap. Those that come early would wait for a timer.
        self._share = _PACED_SHARE if paced else 1.0
        self._due_s = -math.inf
        """When the next message may be sent, by time.monotonic."""
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
        return len(self._generated) - len(self.request.generated)

    @property
    def started(self) -> bool:
        """Whether an attempt has added a token."""
        return self.first_token_ns > 0

    @property
    def kv_is_on_decode(self) -> bool:
        """Whether a decode worker has generated a token from the KV cache of the whole prompt."""
        if self.first_token_by == first_token_pb2.FIRST_TOKEN_POLICY_DECODE:
            return self.started
        return self.second_token_ns > 0

    @property
    def generated(self) -> tuple[int, ...]:
        """All tokens of the completion so far. The next attempt continues after them."""
        return tuple(self._generated)

    @property
    def completion_tokens(self) -> int:
        """The number of tokens of the completion so far."""
        return len(self._generated)

    @property
    def ended_by(self) -> sampling_pb2.FinishReason.ValueType:
        """Why no token can follow. Unspecified while one can."""
        if self.stopped:
            return sampling_pb2.FINISH_REASON_STOP
        return ended_by(self.request, self._generated)

    def attempt_started(
        self,
        decode_worker: WorkerRef,
        on_stopped: Callable[[], None],
        on_drained: Callable[[], None],
    ) -> None:
        """An attempt adds its tokens from now on.

        `on_stopped` is called when a stop string is complete, and `on_drained` when there is room for tokens again.
        """
        self.decode_worker = decode_worker
        self._on_stopped, self._on_drained = on_stopped, on_drained

    def begins_by(self, maker: first_token_pb2.FirstTokenPolicy.ValueType) -> None:
        """`maker` generates the first token, before decode has the KV cache."""
        self.first_token_by = maker

    def use_outlet(self, outlet: Outlet, need_reader: Callable[[], None]) -> None:
        """Sends all messages but the last through `outlet` while the client takes them at once.

        `need_reader` is called at most once: from now on `next_message` must be called for all that is left.
        """
        self._outlet, self._need_reader = outlet, need_reader

    async def write(
        self,
        work: Awaitable[None],
        write: ResponseWriter,
        outlet: Outlet | None = None,
        read_limit_s: float | None = None,
    ) -> None:
        """Writes the response to the client while `work` fills it in this task. Raises its error.

        Raises DeadlineExceeded when the client has not read what it must after `read_limit_s`.

        A reader in a task of its own writes the messages. With `outlet`, the response sends itself, and the reader
        starts when the client does not take a message at once.
        """
        producer = asyncio.current_task()
        assert producer is not None, "a response is written in a task"
        reading: asyncio.Task[None] | None = None
        producing, failed = True, False
        end_s = None if read_limit_s is None else time.monotonic() + read_limit_s

        def end(task: asyncio.Task[None]) -> None:
            nonlocal failed
            if producing and not task.cancelled() and task.exception() is not None:
                # Nothing else would make room for more tokens.
                failed = True
                producer.cancel()

        def start_reading() -> None:
            nonlocal reading
            reading = asyncio.create_task(self._write_all(write, end_s))
            reading.add_done_callback(end)

        if outlet is None:
            start_reading()
        else:
            self.use_outlet(outlet, start_reading)
        try:
            try:
                await work
            except asyncio.CancelledError:
                if not failed:
                    raise
                producer.uncancel()
            # `next_message` raises it again.
            except Exception as error:  # noqa: BLE001
                self.fail(error)
            producing = False
            prompt = self._prompt
            if self._outlet is None or self._last_message is None or (prompt and prompt.pending):
                await (self._write_all(write, end_s) if reading is None else reading)
            else:
                await write(self._build_message())
        finally:
            producing = False
            # Refers to no outlet and no caller any more.
            self._outlet = self._need_reader = None
            self._on_stopped = self._on_drained = _nothing
            self._stop_timer()
            if reading is not None:
                await end_task(reading)

    async def _write_all(self, write: ResponseWriter, end_s: float | None) -> None:
        bound = asyncio.timeout(None if end_s is None else end_s - time.monotonic())
        try:
            async with bound:
                while (message := await self.next_message()) is not None:
                    await write(message)
        except TimeoutError:
            if not bound.expired():
                raise
            raise DeadlineExceeded.waiting_for("the client, which does not read") from None

    def add_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[sampling_pb2.TokenLogprobs] = (),
        prompt_logprobs: Sequence[sampling_pb2.TokenLogprobs] = (),
    ) -> bool:
        """Adds a batch of tokens from a worker, with an entry of logprobs for each if those were requested.

        False while more than PENDING_TOKENS_MAX tokens are in no message. Raises ProtocolViolation for first tokens
        without the prompt's logprobs, if those were requested.
        """
        if self.stopped or not token_ids:
            return not self.full
        if self._prompt is not None and self._prompt.awaited:
            self._prompt.put(prompt_logprobs)
        now_ns = time.monotonic_ns()
        if not self.first_token_ns:
            self.first_token_ns = now_ns
        else:
            self.second_token_ns = self.second_token_ns or now_ns
            gap_ns = now_ns - self.last_token_ns
            if self.gaps is not None:
                self.gaps.record(1e-9 * gap_ns)
            if gap_ns > self.longest_gaps.least_ns:
                self.longest_gaps.add(gap_ns, now_ns)
        self.last_token_ns = now_ns
        if self._text.has_stop_strings:
            self._add_until_stop(token_ids, logprobs)
        else:
            self._generated += token_ids
            self._logprobs += logprobs
        if self._flush_timer is None:
            now_s = 1e-9 * now_ns
            if self._due_s > now_s:
                loop = asyncio.get_running_loop()
                self._flush_timer = loop.call_later(self._due_s - now_s, self._flush_late)
            else:
                self._flush(now_s)
        self.full = len(self._generated) - self._sent > PENDING_TOKENS_MAX
        if self.full:
            self._waits_since_ns = now_ns
        return not self.full

    def _add_until_stop(
        self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprobs]
    ) -> None:
        """Adds tokens one by one, up to the token that completes a stop string."""
        for index, token_id in enumerate(token_ids):
            self._generated.append(token_id)
            self._logprobs.extend(logprobs[index : index + 1])
            self._converted = len(self._generated)
            self._parts.append(self._text.append(token_id, self._converted))
            if self._text.stopped:
                self.stopped = True
                self._on_stopped()
                break

    def finish(
        self,
        reason: sampling_pb2.FinishReason.ValueType,
        usage: inference_pb2.Usage,
        timing: inference_pb2.Timing,
    ) -> None:
        """Ends the response. The next message is the last."""
        self.usage, self.finished_ns = usage, time.monotonic_ns()
        # The text that was held back can complete a stop string.
        self._parts = [self._pending_text(), self._text.finish(len(self._generated))]
        self.stopped = self._text.stopped
        self.finish_reason = sampling_pb2.FINISH_REASON_STOP if self.stopped else reason
        self._last_message = inference_pb2.GenerateResponse(
            finish_reason=self.finish_reason,
            usage=usage,
            timing=timing,
            stop_text=self._text.stopped_by,
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
            if self._prompt is not None and self._prompt.pending:
                # A reader lets others run between the parts of a prompt.
                await asyncio.sleep(0)
            if self._sent < len(self._generated) or self._last_message is not None:
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
            self._flush(time.monotonic())
        # `next_message` raises it.
        except Exception as error:  # noqa: BLE001
            self.fail(error)
            self._use_reader()

    def _flush(self, now_s: float) -> None:
        """Sends what is pending, or lets the reader do so."""
        outlet, prompt = self._outlet, self._prompt
        if outlet is None:
            self._readable.set()
        elif (
            self.first_message_ns
            and not self._needs_messages
            and not self.stopped
            and outlet.write_text(self._pending_text())
        ):
            self._record_message(now_s)
        elif (prompt and prompt.pending) or not outlet.writable:
            self._use_reader()
        else:
            outlet.write_message(self._build_message())

    def _use_reader(self) -> None:
        need_reader, self._outlet, self._need_reader = self._need_reader, None, None
        self._readable.set()
        if need_reader is not None:
            need_reader()

    def _pending_text(self) -> str:
        """The text of the tokens that are in no message. Without stop strings, all are converted in one call."""
        if self._converted < len(self._generated):
            self._parts.append(self._text.extend(self._generated[self._converted :]))
            self._converted = len(self._generated)
        return "".join(self._parts)

    def _build_message(self) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse()
        if self._prompt is not None and self._prompt.pending:
            self._prompt.fill(message)
        else:
            if self._last_message is not None:
                message, self._last_message = self._last_message, None
            message.text = self._pending_text()
            message.token_ids.extend(self._generated[self._sent :])
            message.logprobs.extend(self._logprobs)
            if not self._ended:
                self._readable.clear()
            self._record_message(time.monotonic())
        message.request_id = self.request.request_id
        if not self.first_message_ns:
            message.trace_id = self.trace_id
            self.first_message_ns = time.monotonic_ns()
            self._on_first_message()
        return message

    def _record_message(self, now_s: float) -> None:
        """All tokens are in messages."""
        self._sent = len(self._generated)
        self._parts, self._logprobs = [], []
        self._due_s = now_s + self._share * self._load.message_sent(now_s)
        if self.full:
            self.full = False
            now_ns = time.monotonic_ns()
            self.client_waits.add(now_ns - self._waits_since_ns, now_ns)
            self._on_drained()


def _nothing() -> None:
    """While no attempt runs."""


def ended_by(
    request: PreparedRequest, generated: Sequence[int]
) -> sampling_pb2.FinishReason.ValueType:
    """Why no token can follow the generated ones, apart from stop strings. Unspecified while one can."""
    if generated and generated[-1] in request.stop_token_ids:
        return sampling_pb2.FINISH_REASON_STOP
    if len(generated) >= request.sampling.max_tokens:
        return sampling_pb2.FINISH_REASON_LENGTH
    return sampling_pb2.FINISH_REASON_UNSPECIFIED
