"""What a worker has not sent yet on one link, joined into few messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_engine.interface import DecodeTokens
from headrace_engine.proto import logprobs_to_proto

# Most bytes of a token in a column, of a request's entries in the columns, and of the frame of a nested message.
_TOKEN_BYTES = 5
_ENTRY_BYTES = 15
_FRAME_BYTES = 32


@dataclass(slots=True)
class _Pending:
    """The unsent events of one request, which may send `credit` tokens."""

    credit: int
    queued: bool = False
    reserved: decode_pb2.Reserved | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[sampling_pb2.TokenLogprobs] = field(default_factory=list)
    finished: decode_pb2.Finished | None = None
    status: bytes = b""

    @property
    def sendable(self) -> bool:
        if self.reserved is not None:
            return True
        if self.token_ids:
            return self.credit > 0
        return self.finished is not None or bool(self.status)


class _Columns:
    """The message that is being built."""

    def __init__(self, bytes_max: int) -> None:
        self.message = decode_pb2.LinkResponse()
        self.room_bytes = bytes_max
        self.stream_ids: list[int] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []

    def complete(self) -> decode_pb2.LinkResponse:
        if self.stream_ids:
            self.message.tokens.stream_ids.extend(self.stream_ids)
            self.message.tokens.token_counts.extend(self.counts)
            self.message.tokens.token_ids.extend(self.token_ids)
        return self.message


class Outgoing:
    """The unsent events of all requests of one link.

    A request without credit delays no other. Its tokens are kept: an engine yields at most `max_tokens` of them.
    Methods ignore requests that are not there.
    """

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: the size from which messages are split."""
        self._bytes_max = bytes_max
        self._pending: dict[int, _Pending] = {}
        self._queue: list[int] = []

    @property
    def count(self) -> int:
        """Requests of which the last event is not sent."""
        return len(self._pending)

    def open(self, stream_id: int, credit_tokens: int) -> None:
        """Adds a request."""
        self._pending[stream_id] = _Pending(credit_tokens)

    def grant(self, stream_id: int, credit_tokens: int) -> None:
        """Allows more tokens."""
        pending = self._pending.get(stream_id)
        if pending is not None:
            pending.credit += credit_tokens
            self._enqueue(stream_id, pending)

    def reserve(self, stream_id: int, reserved: decode_pb2.Reserved) -> None:
        """Adds the first event of a request."""
        pending = self._pending.get(stream_id)
        if pending is not None:
            pending.reserved = reserved
            self._enqueue(stream_id, pending)

    def add_tokens(self, stream_id: int, pieces: Sequence[DecodeTokens]) -> None:
        """Adds tokens."""
        pending = self._pending.get(stream_id)
        if pending is None:
            return
        for piece in pieces:
            pending.token_ids.extend(piece.token_ids)
            if piece.logprobs:
                pending.logprobs.extend(map(logprobs_to_proto, piece.logprobs))
        self._enqueue(stream_id, pending)

    def finish(self, stream_id: int, finished: decode_pb2.Finished) -> None:
        """Adds the last event of a request."""
        pending = self._pending.get(stream_id)
        if pending is not None:
            pending.finished = finished
            self._enqueue(stream_id, pending)

    def fail(self, stream_id: int, status: bytes) -> None:
        """Adds an error as the last event of a request, after the tokens before it."""
        pending = self._pending.get(stream_id)
        if pending is not None:
            pending.status = status
            self._enqueue(stream_id, pending)

    def drop(self, stream_id: int) -> None:
        """Forgets a request."""
        self._pending.pop(stream_id, None)

    def next_message(self) -> decode_pb2.LinkResponse | None:
        """The next message, with as many events as fit. None when there is nothing that may be sent."""
        columns = _Columns(self._bytes_max)
        queue, self._queue = self._queue, []
        for index, stream_id in enumerate(queue):
            pending = self._pending.get(stream_id)
            if pending is None:
                continue
            if columns.room_bytes <= 0:
                # Before those that had their turn.
                self._queue = queue[index:] + self._queue
                break
            pending.queued = False
            self._take(stream_id, pending, columns)
            self._enqueue(stream_id, pending)
        if columns.room_bytes == self._bytes_max:
            return None
        return columns.complete()

    def _enqueue(self, stream_id: int, pending: _Pending) -> None:
        if not pending.queued and stream_id in self._pending and pending.sendable:
            pending.queued = True
            self._queue.append(stream_id)

    def _take(self, stream_id: int, pending: _Pending, columns: _Columns) -> None:
        """Moves events of one request into the message."""
        if pending.reserved is not None:
            columns.message.reserved.add(stream_id=stream_id, reserved=pending.reserved)
            columns.room_bytes -= _FRAME_BYTES
            pending.reserved = None
        if pending.token_ids and pending.credit > 0:
            if pending.logprobs:
                _take_with_logprobs(stream_id, pending, columns)
            else:
                _take_tokens(stream_id, pending, columns)
        if not pending.token_ids and (pending.finished is not None or pending.status):
            self._take_end(stream_id, pending, columns)

    def _take_end(self, stream_id: int, pending: _Pending, columns: _Columns) -> None:
        if pending.finished is not None:
            columns.message.finished.add(stream_id=stream_id, finished=pending.finished)
            columns.room_bytes -= _FRAME_BYTES + pending.finished.ByteSize()
        else:
            columns.message.failures.add(stream_id=stream_id, status=pending.status)
            columns.room_bytes -= _FRAME_BYTES + len(pending.status)
        del self._pending[stream_id]


def _take_tokens(stream_id: int, pending: _Pending, columns: _Columns) -> None:
    """Moves as many tokens as credit and room allow, at least one."""
    waiting = pending.token_ids
    count = min(pending.credit, len(waiting))
    if count * _TOKEN_BYTES > columns.room_bytes:
        count = max(1, columns.room_bytes // _TOKEN_BYTES)
    columns.stream_ids.append(stream_id)
    columns.counts.append(count)
    if count == len(waiting):
        columns.token_ids += waiting
        pending.token_ids = []
    else:
        columns.token_ids += waiting[:count]
        del waiting[:count]
    pending.credit -= count
    columns.room_bytes -= _ENTRY_BYTES + count * _TOKEN_BYTES


def _take_with_logprobs(stream_id: int, pending: _Pending, columns: _Columns) -> None:
    count, bytes_taken = 0, 0
    while count < min(pending.credit, len(pending.token_ids)):
        bytes_taken += _TOKEN_BYTES + _ENTRY_BYTES + pending.logprobs[count].ByteSize()
        count += 1
        if bytes_taken >= columns.room_bytes:
            break
    columns.message.tokens_with_logprobs.add(
        stream_id=stream_id,
        tokens=decode_pb2.Tokens(
            token_ids=pending.token_ids[:count], logprobs=pending.logprobs[:count]
        ),
    )
    del pending.token_ids[:count], pending.logprobs[:count]
    pending.credit -= count
    columns.room_bytes -= _FRAME_BYTES + bytes_taken
