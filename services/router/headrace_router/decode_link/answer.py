"""The answers on one link: the messages of a worker bring events, and each goes to its attempt at once."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, TypeVar

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import receipt_pb2, sampling_pb2
from headrace_common.errors import DeadlineExceeded, HeadraceError, ProtocolViolation
from headrace_common.limits import PROMPT_LOGPROBS_VALUES_MAX
from headrace_common.rpc.status import error_from_status

_UNPAID_MAX: Final = 1_024
Logprobs: TypeAlias = Sequence[sampling_pb2.TokenLogprobs]
AddBatch: TypeAlias = Callable[[Sequence[int], Logprobs, Logprobs], bool]
"""See LinkedAnswer.add_batch."""
_Event = TypeVar("_Event")


class LinkedAnswer(ABC):
    """One request on a link: its credit, its deadline, and the worker's times.

    A subclass uses the worker's events, until one of them ends the request.
    """

    vocabulary_size: int
    """Every token is below this."""
    stream_id = 0
    times: decode_pb2.AttemptTimes | None = None
    """The worker's times, once it has sent a token."""
    reserved_ns = 0
    """Arrival of the reservation by the monotonic clock; 0 before it."""
    _window_tokens = _allowed_tokens = _used_tokens = 0
    _on_used: Callable[[int, int], None]
    _add: AddBatch | None = None
    """Gets new tokens in place of `add_batch`."""
    _prompt_logprobs: list[sampling_pb2.TokenLogprobs]
    _timer: asyncio.TimerHandle | None = None
    on_receipt: Callable[[receipt_pb2.Receipt], None] | None = None
    """See report_late."""

    @abstractmethod
    def reserve(self, reserved: decode_pb2.Reserved) -> None:
        """The blocks are reserved."""

    @abstractmethod
    def add_batch(
        self,
        token_ids: Sequence[int],
        logprobs: Logprobs,
        prompt_logprobs: Logprobs,
    ) -> bool:
        """New tokens. Without room for more it returns False, and calls `return_credit` later.

        With `forward`, they go elsewhere.
        """

    @abstractmethod
    def finish(self, finished: decode_pb2.Finished) -> None:
        """The request has ended."""

    @abstractmethod
    def worker_failed(self, error: HeadraceError) -> None:
        """The request has failed on the worker, or has no answer in time."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Another method has raised an error."""

    def opened(
        self, stream_id: int, window_tokens: int, on_used: Callable[[int, int], None]
    ) -> None:
        """The request is on a link.

        `on_used` gets the number of tokens that the worker may send in addition, in few calls.
        """
        self.stream_id = stream_id
        self._window_tokens = self._allowed_tokens = window_tokens
        self._on_used, self._prompt_logprobs = on_used, []

    def report_late(self, on_receipt: Callable[[receipt_pb2.Receipt], None]) -> None:
        """`on_receipt` gets a receipt that comes after the end."""
        self.on_receipt = on_receipt

    def forward(self, add: AddBatch) -> None:
        """From now on `add` gets new tokens."""
        self._add = add

    def expire_after(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        """Fails the request then, unless it has ended."""
        self._timer = loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self.worker_failed(DeadlineExceeded("the deadline passed"))

    def unlink(self) -> None:
        """No event follows."""
        if self._timer is not None:
            self._timer.cancel()
        self._add = None

    def use(self, event: Callable[[_Event], None], value: _Event) -> None:
        """Calls a method with an event. The request fails by its error, and others go on."""
        try:
            event(value)
        except Exception as error:  # noqa: BLE001 - the attempt raises it
            self.fail(error)

    def receive_reserved(self, reserved: decode_pb2.Reserved) -> None:
        """The blocks are reserved now."""
        self.reserved_ns = time.monotonic_ns()
        self.use(self.reserve, reserved)

    def add_times(self, times: decode_pb2.AttemptTimes) -> None:
        """The worker's times until now."""
        self.times = times

    def add_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """They join the first tokens that arrive. Raises ProtocolViolation when no request may have so many."""
        self._prompt_logprobs += logprobs
        if len(self._prompt_logprobs) > PROMPT_LOGPROBS_VALUES_MAX:
            raise ProtocolViolation("the worker sent more prompt logprobs than a request may have")

    def add_tokens(self, token_ids: Sequence[int], logprobs: Logprobs = ()) -> None:
        """New tokens. Raises ProtocolViolation when they are more than the credit allows."""
        count = len(token_ids)
        self._allowed_tokens -= count
        if self._allowed_tokens < 0:
            raise ProtocolViolation(
                f"the worker sent {-self._allowed_tokens} tokens more than it had credit for"
            )
        if not count:
            return
        if max(token_ids) >= self.vocabulary_size:
            self.worker_failed(
                ProtocolViolation(
                    f"sent token {max(token_ids)}, and the vocabulary has {self.vocabulary_size}"
                )
            )
            # Those after it would join what came before.
            self._add = _ignore
            return
        self._used_tokens += count
        prompt_logprobs: Logprobs = ()
        if self._prompt_logprobs:
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        try:
            has_room = (self._add or self.add_batch)(token_ids, logprobs, prompt_logprobs)
        except Exception as error:  # noqa: BLE001 - the attempt raises it, and other requests go on
            self.fail(error)
            self._add = _ignore
        else:
            if has_room and self._used_tokens * 2 >= self._window_tokens:
                self.return_credit()

    def return_credit(self) -> None:
        """All tokens that have arrived are used."""
        if self._used_tokens * 2 >= self._window_tokens:
            self._on_used(self.stream_id, self._used_tokens)
            self._allowed_tokens += self._used_tokens
            self._used_tokens = 0


def _ignore(token_ids: Sequence[int], logprobs: Logprobs, prompt_logprobs: Logprobs) -> bool:
    """The tokens of a request that has failed."""
    return True


class LinkedAnswers:
    """Requests leave with their last event. Events of requests that are not there are ignored: they were cancelled."""

    def __init__(self) -> None:
        self.by_stream: dict[int, LinkedAnswer] = {}
        """Those of requests in progress."""
        self._unpaid: dict[int, Callable[[receipt_pb2.Receipt], None]] = {}
        """Of cancelled and failed requests, of which a receipt may come."""

    def add(self, answer: LinkedAnswer) -> None:
        """Adds a request."""
        self.by_stream[answer.stream_id] = answer

    def remove(self, stream_id: int) -> LinkedAnswer | None:
        """None when the request has ended."""
        answer = self.by_stream.pop(stream_id, None)
        if answer is not None:
            self._await_receipt(answer)
        return answer

    def _await_receipt(self, answer: LinkedAnswer) -> None:
        if answer.on_receipt is None:
            return
        self._unpaid[answer.stream_id] = answer.on_receipt
        if len(self._unpaid) > _UNPAID_MAX:
            del self._unpaid[next(iter(self._unpaid))]

    def fail_all(self, failure: Callable[[], HeadraceError]) -> None:
        """Ends every request with an error of its own."""
        answers, self.by_stream = self.by_stream, {}
        for answer in answers.values():
            answer.unlink()
            answer.worker_failed(failure())

    def receive(self, response: decode_pb2.LinkResponse) -> None:
        """Passes on all events of a message. Raises ProtocolViolation."""
        answers = self.by_stream
        # An iterator over an empty field costs several times as much as one over an empty tuple.
        for reserved in response.reserved or ():
            answer = answers.get(reserved.stream_id)
            if answer is not None:
                answer.receive_reserved(reserved.reserved)
        for timed in response.times or ():
            answer = answers.get(timed.stream_id)
            if answer is not None:
                answer.add_times(timed.times)
        if response.HasField("tokens"):
            self._receive_columns(response.tokens)
        for one in response.tokens_with_logprobs or ():
            answer = answers.get(one.stream_id)
            if answer is not None:
                answer.add_prompt_logprobs(one.tokens.prompt_logprobs)
                answer.add_tokens(one.tokens.token_ids, one.tokens.logprobs)
        if response.finished or response.failures or response.receipts:
            self._receive_ends(response)

    def _receive_ends(self, response: decode_pb2.LinkResponse) -> None:
        answers = self.by_stream
        for finished in response.finished or ():
            answer = answers.pop(finished.stream_id, None)
            if answer is not None:
                answer.unlink()
                answer.use(answer.finish, finished.finished)
        for failure in response.failures or ():
            answer = answers.pop(failure.stream_id, None)
            if answer is not None:
                if answer.reserved_ns:
                    # Without blocks it has cost nothing.
                    self._await_receipt(answer)
                answer.unlink()
                answer.worker_failed(error_from_status(failure.status))
        for one in response.receipts or ():
            if (on_receipt := self._unpaid.pop(one.stream_id, None)) is not None:
                on_receipt(one.receipt)

    def _receive_columns(self, tokens: decode_pb2.LinkTokens) -> None:
        # Slices are lists, which iterators make with a call for each entry.
        token_ids, counts = tokens.token_ids[:], tokens.token_counts[:]
        if len(tokens.stream_ids) != len(counts) or sum(counts) != len(token_ids):
            raise ProtocolViolation("the worker sent columns of tokens that differ in length")
        answers, start = self.by_stream, 0
        for stream_id, count in zip(tokens.stream_ids[:], counts, strict=True):
            answer = answers.get(stream_id)
            if answer is not None:
                answer.add_tokens(token_ids[start : start + count])
            start += count
