"""The response to one request: coalesces tokens and their text into messages.

The dispatcher adds tokens, and the RPC handler reads messages. Tokens that arrive while a message is written, or
within the stream's minimum gap between two messages, share the next message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2
from headrace_common.latency.clocks import clocks_now
from headrace_common.process.pacing import FlushPace, LoopLoad
from headrace_common.telemetry.metrics.instruments import BucketCounts
from headrace_frontend.request.completion_text import PendingTokens, PromptLogprobs
from headrace_frontend.request.validation import PreparedRequest
from headrace_kv.layout import WorkerRef

PENDING_TOKENS_MAX = 1_024

TextOutlet: TypeAlias = Callable[[str], bool]
"""Sends text to the client at once. False, and nothing is sent, when the client cannot take it now."""

MessageOutlet: TypeAlias = Callable[[inference_pb2.GenerateResponse], bool]
"""The same for a whole message."""


def _ignore() -> None:
    pass


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
    ) -> None:
        """`paced`: see FlushPace. `gaps` counts the seconds between two batches of tokens."""
        self._request = request
        self.trace_id = trace_id
        """The trace of the request, as 32 hex characters."""
        self._pending = PendingTokens(request)
        self._prompt = PromptLogprobs(request)
        self._last_message: inference_pb2.GenerateResponse | None = None
        self._error: Exception | None = None
        self._ended = False
        self._sent_first_message = False
        self._readable = asyncio.Event()
        self._outlet: TextOutlet | None = None
        self._message_outlet: MessageOutlet | None = None
        """Set while no reader is needed."""
        self._refused: inference_pb2.GenerateResponse | None = None
        """The message that the outlet did not take."""
        self._when_refused: Callable[[], None] = _ignore
        self._reader_waits = False
        self._flush_timer: asyncio.TimerHandle | None = None
        """Runs until the next message may be sent, while tokens for it are pending."""
        self._drained = asyncio.Event()
        self._pace = FlushPace(load or LoopLoad(), paced=paced)
        self._start_unix_ns, self._start_ns, _ = clocks_now()
        self.finish_reason: sampling_pb2.FinishReason.ValueType = (
            sampling_pb2.FINISH_REASON_UNSPECIFIED
        )
        self.first_token_by = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
        """How the first token was generated."""
        self.decode_worker: WorkerRef | None = None
        """The decode worker of the latest attempt."""
        self.first_token_unix_ns = 0
        self.second_token_unix_ns = 0
        """Arrival of the second batch of tokens. A fast decode worker sends several tokens in a batch."""
        self.last_token_unix_ns = 0
        self.usage: inference_pb2.Usage | None = None
        """The usage of a response that has ended without an error."""
        self.gaps = gaps
        self.first_message_unix_ns = 0
        """When the message with the first token was made; 0 before it."""

    @property
    def model(self) -> str:
        """The name of the request's model."""
        return self._request.model

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self._request.token_ids)

    @property
    def new_tokens(self) -> int:
        """The number of tokens that attempts have added."""
        return len(self._pending.generated) - len(self._request.generated)

    @property
    def started(self) -> bool:
        """Whether an attempt has added a token."""
        return self.new_tokens > 0

    @property
    def kv_is_on_decode(self) -> bool:
        """Whether a decode worker has generated a token from the KV cache of the whole prompt."""
        if self.first_token_by == first_token_pb2.FIRST_TOKEN_POLICY_DECODE:
            return self.started
        return self.second_token_unix_ns > 0

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
        return ended_by(self._request, self._pending.generated)

    def attempt_started(self, decode_worker: WorkerRef) -> None:
        """An attempt adds its tokens from now on."""
        self.decode_worker = decode_worker

    def now_unix_ns(self) -> int:
        """The wall clock of the response's start, continued by the monotonic clock: a clock that is set changes no
        duration.
        """
        return self._start_unix_ns + time.monotonic_ns() - self._start_ns

    def monotonic_us(self, unix_ns: int) -> int:
        """Microseconds of the monotonic clock at a time of this response."""
        return (unix_ns - self._start_unix_ns + self._start_ns) // 1_000

    def use_outlets(
        self,
        text: TextOutlet,
        message: MessageOutlet | None = None,
        when_refused: Callable[[], None] = _ignore,
    ) -> None:
        """Lets `add_tokens` send to the client itself, which saves a turn of the event loop.

        While `next_message` waits for tokens, `text` gets the text between the first and the last message, unless it
        has logprobs. With `message`, no reader is needed for any message but the last one. `when_refused` is called at
        most once: the client cannot take a message, and from now on a reader is needed.
        """
        self._outlet, self._message_outlet = text, message
        self._when_refused = when_refused

    def stop_sending(self) -> None:
        """Sends nothing from now on by itself. Refers to no outlet and no caller any more."""
        self._outlet = self._message_outlet = None
        self._when_refused = _ignore
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
        await self.wait_room()

    @property
    def has_room(self) -> bool:
        """Whether at most PENDING_TOKENS_MAX tokens are not sent yet."""
        return len(self._pending.token_ids) <= PENDING_TOKENS_MAX

    async def wait_room(self) -> None:
        """Returns when the response has room."""
        while not self.has_room:
            self._drained.clear()
            await self._drained.wait()

    def take_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprobs]
    ) -> bool:
        """As `add_tokens`, without waiting. False when there is no room for more now, or the response has stopped."""
        if token_ids and not self.stopped:
            self._append(token_ids, logprobs)
        return self.has_room and not self.stopped

    def _append(
        self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprobs]
    ) -> None:
        now_ns = time.monotonic_ns()
        now_unix_ns = self._start_unix_ns + now_ns - self._start_ns
        if not self.first_token_unix_ns:
            self.first_token_unix_ns = now_unix_ns
        elif not self.second_token_unix_ns:
            self.second_token_unix_ns = now_unix_ns
        if self.gaps is not None and self.last_token_unix_ns:
            self.gaps.record(1e-9 * (now_unix_ns - self.last_token_unix_ns))
        self.last_token_unix_ns = now_unix_ns
        self._pending.add(token_ids, logprobs)
        if self._flush_timer is not None or self._readable.is_set():
            return
        rest_s = self._pace.batch_s(now_ns / 1e9)
        if rest_s > 0:
            self._flush_timer = asyncio.get_running_loop().call_later(rest_s, self._flush_later)
        else:
            self._flush()

    def finish(
        self,
        reason: sampling_pb2.FinishReason.ValueType,
        usage: inference_pb2.Usage,
        timing: inference_pb2.Timing,
    ) -> None:
        """Ends the response. The next message is the last."""
        self.usage = usage
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
            if not self._readable.is_set():
                self._reader_waits = True
                try:
                    await self._readable.wait()
                finally:
                    self._reader_waits = False
            if self._refused is not None:
                refused, self._refused = self._refused, None
                return refused
            if self._prompt.pending:
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

    def _flush_later(self) -> None:
        try:
            self._flush()
        # `next_message` raises it.
        except Exception as error:  # noqa: BLE001
            self.fail(error)
            self._need_reader()

    def _need_reader(self) -> None:
        if self._message_outlet is not None:
            self._message_outlet = None
            self._when_refused()

    def _flush(self) -> None:
        """The gap since the last message has passed: sends what is pending, or lets the reader do so."""
        self._flush_timer = None
        if self._message_outlet is not None:
            self._send_now(self._message_outlet)
            return
        if self._reader_waits and self._outlet is not None and self._send_text(self._outlet):
            return
        self._readable.set()

    def _send_now(self, outlet: MessageOutlet) -> None:
        """Sends what is pending, without a reader if the client can take it."""
        if self._outlet is not None and self._send_text(self._outlet):
            return
        if not self._prompt.pending:
            message = self._build_message()
            if outlet(message):
                return
            self._refused = message
        # A reader lets others run between the parts of a prompt.
        self._readable.set()
        self._need_reader()

    def _send_text(self, outlet: TextOutlet) -> bool:
        """Sends what is pending through the outlet. False when `next_message` must send it."""
        pending = self._pending
        if not self._sent_first_message or pending.logprobs or self.stopped:
            return False
        text = pending.text
        # No text: the tokens are a part of a character.
        if text and not outlet(text):
            return False
        pending.clear()
        self._record_flush()
        return True

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
        message.request_id = self._request.request_id
        if not self._sent_first_message:
            message.trace_id = self.trace_id
            self._sent_first_message = True
            self.first_message_unix_ns = self.now_unix_ns()
        return message

    def _record_flush(self) -> None:
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
