"""What a worker has not sent yet on one link, joined into few messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_engine.interface import DecodeTokens, TokenLogprobs
from headrace_engine.proto import logprobs_to_proto

# Most bytes of a token in a column, of a request's entries in the columns, and of the frame of a nested message.
_TOKEN_BYTES = 5
_ENTRY_BYTES = 15
_FRAME_BYTES = 32
# Of prompts in one message. Converting so many takes some 20 ms, in which no other request gets tokens.
_PROMPT_BYTES_MAX = 131_072


class _Message:
    """The message that is being built. `room_bytes` falls to 0 or below when it is full."""

    def __init__(self, bytes_max: int) -> None:
        self.room_bytes = bytes_max
        self._message = decode_pb2.LinkResponse()
        self._stream_ids: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []

    def add_reserved(self, stream_id: int, reserved: decode_pb2.Reserved) -> None:
        self._message.reserved.add(stream_id=stream_id, reserved=reserved)
        self._use(_FRAME_BYTES)

    def add_times(self, stream_id: int, times: decode_pb2.AttemptTimes) -> None:
        self._message.times.add(stream_id=stream_id, times=times)
        self._use(_FRAME_BYTES + times.ByteSize())

    def add_tokens(self, stream_id: int, token_ids: list[int]) -> None:
        count = len(token_ids)
        self._stream_ids.append(stream_id)
        self._counts.append(count)
        self._token_ids += token_ids
        # As `_use`, for the entries of which there are most.
        self.room_bytes -= _ENTRY_BYTES + count * _TOKEN_BYTES

    def add_with_logprobs(self, stream_id: int, tokens: decode_pb2.Tokens) -> None:
        self._message.tokens_with_logprobs.add(stream_id=stream_id, tokens=tokens)
        self._use(_FRAME_BYTES + tokens.ByteSize())

    def add_finished(self, stream_id: int, finished: decode_pb2.Finished) -> None:
        self._message.finished.add(stream_id=stream_id, finished=finished)
        self._use(_FRAME_BYTES + finished.ByteSize())

    def add_failure(self, stream_id: int, status: bytes) -> None:
        self._message.failures.add(stream_id=stream_id, status=status)
        self._use(_FRAME_BYTES + len(status))

    def complete(self) -> decode_pb2.LinkResponse:
        if self._stream_ids:
            columns = self._message.tokens
            columns.stream_ids.extend(self._stream_ids)
            columns.token_counts.extend(self._counts)
            columns.token_ids.extend(self._token_ids)
        return self._message

    def _use(self, count_bytes: int) -> None:
        self.room_bytes -= count_bytes


class _Pending:
    """The unsent events of one request."""

    def __init__(self, stream_id: int, credit_tokens: int) -> None:
        self._stream_id = stream_id
        self._credit = credit_tokens
        self._reserved: decode_pb2.Reserved | None = None
        self._times: decode_pb2.AttemptTimes | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[sampling_pb2.TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        """Those of the prompt that are not sent, last ones first."""
        self._finished: decode_pb2.Finished | None = None
        self._status = b""
        self._has_end = False
        self.sent_end = False

    @property
    def sendable(self) -> bool:
        """Whether `move_to` would move an event."""
        if self._reserved is not None:
            return True
        if self._token_ids:
            return self._credit > 0
        return self._has_end and not self.sent_end

    @property
    def may_wait(self) -> bool:
        """Whether it has nothing but tokens after those with its times."""
        return self._reserved is None and self._times is None and not self._has_end

    def grant(self, credit_tokens: int) -> None:
        self._credit += credit_tokens

    def reserve(self, reserved: decode_pb2.Reserved) -> None:
        self._reserved = reserved

    def add_times(self, times: decode_pb2.AttemptTimes) -> None:
        self._times = times

    def add_tokens(self, pieces: Sequence[DecodeTokens]) -> None:
        for piece in pieces:
            self._token_ids.extend(piece.token_ids)
            if piece.logprobs:
                self._logprobs.extend(map(logprobs_to_proto, piece.logprobs))
            if piece.prompt_logprobs:
                self._prompt_logprobs = list(reversed(piece.prompt_logprobs))

    def finish(self, finished: decode_pb2.Finished) -> None:
        self._finished = finished
        self._has_end = True

    def fail(self, status: bytes) -> None:
        self._status = status
        self._has_end = True

    def move_to(self, message: _Message) -> None:
        """Moves the events that credit and room allow, at least one."""
        if self._reserved is not None:
            message.add_reserved(self._stream_id, self._reserved)
            self._reserved = None
        if self._token_ids and self._credit > 0:
            if self._times is not None:
                message.add_times(self._stream_id, self._times)
                self._times = None
            self._move_tokens(message)
        if self._token_ids or not self._has_end:
            return
        self.sent_end = True
        if self._finished is not None:
            message.add_finished(self._stream_id, self._finished)
        else:
            message.add_failure(self._stream_id, self._status)

    def _move_tokens(self, message: _Message) -> None:
        token_ids = self._token_ids
        allowed = min(self._credit, len(token_ids))
        if self._prompt_logprobs:
            count = self._move_prompt_logprobs(message)
        elif self._logprobs:
            count = self._count_with_logprobs(allowed, message.room_bytes)
            tokens = decode_pb2.Tokens(
                token_ids=self._token_ids[:count], logprobs=self._logprobs[:count]
            )
            message.add_with_logprobs(self._stream_id, tokens)
            del self._token_ids[:count], self._logprobs[:count]
        else:
            count = min(allowed, max(1, message.room_bytes // _TOKEN_BYTES))
            message.add_tokens(self._stream_id, token_ids[:count])
            del token_ids[:count]
        self._credit -= count

    def _move_prompt_logprobs(self, message: _Message) -> int:
        """Moves those that fit, and with the last one the first token. Returns how many tokens it has moved."""
        tokens = decode_pb2.Tokens()
        room_bytes = min(message.room_bytes, _PROMPT_BYTES_MAX)
        while self._prompt_logprobs and room_bytes > 0:
            entry = logprobs_to_proto(self._prompt_logprobs.pop())
            tokens.prompt_logprobs.append(entry)
            room_bytes -= _ENTRY_BYTES + entry.ByteSize()
        count = 0 if self._prompt_logprobs else 1
        tokens.token_ids.extend(self._token_ids[:count])
        tokens.logprobs.extend(self._logprobs[:count])
        message.add_with_logprobs(self._stream_id, tokens)
        del self._token_ids[:count], self._logprobs[:count]
        return count

    def _count_with_logprobs(self, allowed: int, room_bytes: int) -> int:
        count = 0
        while count < allowed and room_bytes > 0:
            room_bytes -= _TOKEN_BYTES + _ENTRY_BYTES + self._logprobs[count].ByteSize()
            count += 1
        return max(1, count)


class Outgoing:
    """The unsent events of all requests of one link.

    A request without credit delays no other. Its tokens are kept: an engine yields at most `max_tokens` of them.
    Methods ignore requests that are not there.
    """

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: the size from which messages are split."""
        self._bytes_max = bytes_max
        self._pending: dict[int, _Pending] = {}
        self._queue: dict[int, _Pending] = {}
        self._waiting: dict[int, _Pending] = {}
        """Those with nothing but tokens that may wait."""

    @property
    def count(self) -> int:
        """Requests of which the last event is not sent."""
        return len(self._pending)

    @property
    def has_waiting(self) -> bool:
        """Whether there are tokens that may wait."""
        return bool(self._waiting)

    def open(self, stream_id: int, credit_tokens: int) -> None:
        """Adds a request."""
        self._pending[stream_id] = _Pending(stream_id, credit_tokens)

    def grant(self, stream_id: int, credit_tokens: int) -> None:
        """Allows more tokens."""
        pending = self._pending.get(stream_id)
        if pending is not None:
            pending.grant(credit_tokens)
            self._enqueue(stream_id, pending)

    def reserve(self, stream_id: int, reserved: decode_pb2.Reserved) -> None:
        """Adds the first event of a request."""
        pending = self._pending.get(stream_id)
        if pending is not None:
            pending.reserve(reserved)
            self._enqueue(stream_id, pending)

    def add_times(self, stream_id: int, times: decode_pb2.AttemptTimes) -> None:
        """Adds the times of a request, which go with its next tokens. They replace times that are not sent yet."""
        pending = self._pending.get(stream_id)
        if pending is not None:
            pending.add_times(times)

    def add_tokens(self, stream_id: int, pieces: Sequence[DecodeTokens]) -> None:
        """Adds tokens."""
        pending = self._pending.get(stream_id)
        if pending is not None:
            pending.add_tokens(pieces)
            self._enqueue(stream_id, pending)

    def finish(self, stream_id: int, finished: decode_pb2.Finished) -> None:
        """Adds the last event of a request."""
        pending = self._pending.get(stream_id)
        if pending is not None:
            pending.finish(finished)
            self._enqueue(stream_id, pending)

    def fail(self, stream_id: int, status: bytes) -> None:
        """Adds an error as the last event of a request, after the tokens before it."""
        pending = self._pending.get(stream_id)
        if pending is not None:
            pending.fail(status)
            self._enqueue(stream_id, pending)

    def drop(self, stream_id: int) -> None:
        """Forgets a request."""
        self._pending.pop(stream_id, None)
        self._queue.pop(stream_id, None)
        self._waiting.pop(stream_id, None)

    def next_message(self, *, holds_tokens: bool = False) -> decode_pb2.LinkResponse | None:
        """The next message: each request once, and as many events as fit. None when nothing may be sent.

        `holds_tokens` leaves tokens that may wait for a later message.
        """
        queue, unfinished = self._queue, dict[int, _Pending]()
        if not holds_tokens:
            queue |= self._waiting
            self._waiting.clear()
        if not queue:
            return None
        message = _Message(self._bytes_max)
        while queue and message.room_bytes > 0:
            stream_id = next(iter(queue))
            pending = queue.pop(stream_id)
            pending.move_to(message)
            if pending.sent_end:
                del self._pending[stream_id]
            elif pending.sendable:
                unfinished[stream_id] = pending
        # Those that had no turn go first.
        queue |= unfinished
        return message.complete()

    def _enqueue(self, stream_id: int, pending: _Pending) -> None:
        if not pending.sendable or stream_id in self._queue:
            return
        if pending.may_wait:
            self._waiting[stream_id] = pending
        else:
            self._waiting.pop(stream_id, None)
            self._queue[stream_id] = pending
