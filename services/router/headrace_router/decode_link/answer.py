"""The answers on one link: events that attempts have not read yet, and the messages that bring them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_common.errors import HeadraceError, ProtocolViolation
from headrace_common.limits import PROMPT_LOGPROBS_VALUES_MAX
from headrace_common.rpc.status import error_from_status

AnswerEvent: TypeAlias = decode_pb2.Reserved | decode_pb2.Tokens | decode_pb2.Finished
TokenSink: TypeAlias = Callable[[Sequence[int], Sequence[sampling_pb2.TokenLogprobs]], bool]
"""Uses tokens at once, with an entry of logprobs for each if those were requested.

False when the reader must act before more of them can be used.
"""


class LinkedAnswer:
    """Filled by the link, read by one attempt. It holds at most `window_tokens` tokens.

    `on_read` gets the number of tokens that the worker may send in addition, in few calls.
    """

    def __init__(
        self,
        stream_id: int,
        window_tokens: int,
        on_read: Callable[[int, int], None],
        vocabulary_size: int,
    ) -> None:
        self.stream_id = stream_id
        self._vocabulary_size = vocabulary_size
        self._window_tokens = window_tokens
        self._allowed_tokens = window_tokens
        self._on_read = on_read
        self._read_tokens = 0
        self.times: decode_pb2.AttemptTimes | None = None
        """The worker's times, once it has sent a token."""
        self.reserved_ns = 0
        """Arrival of the reservation by the monotonic clock; 0 before it."""
        self._reserved: decode_pb2.Reserved | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[sampling_pb2.TokenLogprobs] = []
        self._prompt_logprobs: list[sampling_pb2.TokenLogprobs] = []
        self._finished: decode_pb2.Finished | None = None
        self._error: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: TokenSink | None = None
        self._broken: Exception | None = None
        self._needs_reader = False

    def forward(self, sink: TokenSink) -> None:
        """From now on tokens that arrive while `read` waits go to `sink`, which saves a turn of the event loop.

        `read` returns an event without tokens when the sink needs its reader, and raises the sink's error.
        """
        self._sink = sink

    def reserve(self, reserved: decode_pb2.Reserved) -> None:
        """The blocks are reserved."""
        self._reserved = reserved
        self.reserved_ns = time.monotonic_ns()
        self._wake()

    def add_prompt_logprobs(self, logprobs: Sequence[sampling_pb2.TokenLogprobs]) -> None:
        """They join the first tokens that arrive. Raises ProtocolViolation when no request may have so many."""
        self._prompt_logprobs += logprobs
        if len(self._prompt_logprobs) > PROMPT_LOGPROBS_VALUES_MAX:
            raise ProtocolViolation("the worker sent more prompt logprobs than a request may have")

    def add_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprobs] = ()
    ) -> None:
        """New tokens. Raises ProtocolViolation when they are more than the credit allows.

        After a token beyond the vocabulary, `read` raises ProtocolViolation. Other requests go on.
        """
        count = len(token_ids)
        self._allowed_tokens -= count
        if self._allowed_tokens < 0:
            raise ProtocolViolation(
                f"the worker sent {-self._allowed_tokens} tokens more than it had credit for"
            )
        sink, waiter = self._sink, self._waiter
        if count and max(token_ids) >= self._vocabulary_size:
            self._broken = ProtocolViolation(
                f"sent token {max(token_ids)}, and the vocabulary has {self._vocabulary_size}"
            )
            self._wake()
            return
        if sink is None or waiter is None or waiter.done():
            self._token_ids += token_ids
            self._logprobs += logprobs
            self._wake()
            return
        self._read_tokens += count
        try:
            if sink(token_ids, logprobs):
                if self._read_tokens * 2 >= self._window_tokens:
                    self._return_credit()
                return
        except Exception as error:  # noqa: BLE001 - the reader raises it, and other requests go on
            self._broken = error
        self._needs_reader = True
        self._wake()

    def add_times(self, times: decode_pb2.AttemptTimes) -> None:
        """The worker's times until now."""
        self.times = times

    def finish(self, finished: decode_pb2.Finished) -> None:
        """The request has ended."""
        self._finished = finished
        self._wake()

    def fail(self, error: HeadraceError) -> None:
        """The request has failed. `read` raises the first error, after the events before it."""
        if self._error is None:
            self._error = error
            self._wake()

    async def read(self) -> AnswerEvent:
        """The next event. Tokens that have arrived meanwhile are one event. Raises the error of `fail`."""
        while True:
            event = self.poll()
            if event is not None:
                return event
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def poll(self) -> AnswerEvent | None:
        """As `read`. None when nothing has arrived."""
        self._return_credit()
        if self._broken is not None:
            raise self._broken
        event = self._next_event()
        if event is None and self._error is not None:
            raise self._error
        return event

    def _next_event(self) -> AnswerEvent | None:
        if self._reserved is not None:
            reserved, self._reserved = self._reserved, None
            return reserved
        if self._token_ids:
            tokens = decode_pb2.Tokens(
                token_ids=self._token_ids,
                logprobs=self._logprobs,
                prompt_logprobs=self._prompt_logprobs,
            )
            self._read_tokens += len(self._token_ids)
            self._token_ids, self._logprobs, self._prompt_logprobs = [], [], []
            return tokens
        if self._needs_reader:
            self._needs_reader = False
            return decode_pb2.Tokens()
        return self._finished

    def _return_credit(self) -> None:
        """Allows as many tokens as were read and, because this is the next read, are used."""
        if self._read_tokens * 2 < self._window_tokens:
            return
        self._on_read(self.stream_id, self._read_tokens)
        self._allowed_tokens += self._read_tokens
        self._read_tokens = 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LinkedAnswers:
    """Requests leave with their last event. Events of requests that are not there are ignored: they were cancelled."""

    def __init__(self) -> None:
        self._answers: dict[int, LinkedAnswer] = {}

    @property
    def count(self) -> int:
        """Requests in progress."""
        return len(self._answers)

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._answers

    def add(self, answer: LinkedAnswer) -> None:
        """Adds a request."""
        self._answers[answer.stream_id] = answer

    def remove(self, stream_id: int) -> LinkedAnswer | None:
        """None when the request has ended."""
        return self._answers.pop(stream_id, None)

    def fail_all(self, failure: Callable[[], HeadraceError]) -> None:
        """Ends every request with an error of its own."""
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.fail(failure())

    def receive(self, response: decode_pb2.LinkResponse) -> list[int]:
        """Passes on all events of a message. Returns the ids of requests that have ended by it.

        Raises ProtocolViolation.
        """
        for reserved in response.reserved:
            answer = self._answers.get(reserved.stream_id)
            if answer is not None:
                answer.reserve(reserved.reserved)
        for timed in response.times:
            answer = self._answers.get(timed.stream_id)
            if answer is not None:
                answer.add_times(timed.times)
        if response.HasField("tokens"):
            self._receive_columns(response.tokens)
        for one in response.tokens_with_logprobs:
            answer = self._answers.get(one.stream_id)
            if answer is not None:
                answer.add_prompt_logprobs(one.tokens.prompt_logprobs)
                answer.add_tokens(one.tokens.token_ids, one.tokens.logprobs)
        ended: list[int] = []
        for finished in response.finished:
            ended.append(finished.stream_id)
            answer = self.remove(finished.stream_id)
            if answer is not None:
                answer.finish(finished.finished)
        for failure in response.failures:
            ended.append(failure.stream_id)
            answer = self.remove(failure.stream_id)
            if answer is not None:
                answer.fail(error_from_status(failure.status))
        return ended

    def _receive_columns(self, tokens: decode_pb2.LinkTokens) -> None:
        token_ids, counts = list(tokens.token_ids), list(tokens.token_counts)
        if len(tokens.stream_ids) != len(counts) or sum(counts) != len(token_ids):
            raise ProtocolViolation("the worker sent columns of tokens that differ in length")
        answers, start = self._answers, 0
        for stream_id, count in zip(tokens.stream_ids, counts, strict=True):
            answer = answers.get(stream_id)
            if answer is not None:
                answer.add_tokens(token_ids[start : start + count])
            start += count
