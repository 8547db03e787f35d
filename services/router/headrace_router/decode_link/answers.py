"""The requests in progress on one link, and the messages that fill their answers."""

from __future__ import annotations

from collections.abc import Callable

from headrace.decode.v1 import decode_pb2
from headrace_common.errors import HeadraceError, ProtocolViolation
from headrace_common.rpc.status import error_from_status
from headrace_router.decode_link.answer import LinkedAnswer


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
