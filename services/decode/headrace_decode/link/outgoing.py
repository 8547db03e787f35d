"""What a worker has not sent yet on one link, joined into few messages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import receipt_pb2, sampling_pb2
from headrace_common.errors import HeadraceError
from headrace_common.limits import LINK_MESSAGE_BYTES_MAX
from headrace_common.process.pacing import GAP_MIN_S, JOIN_S
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
        self.response = decode_pb2.LinkResponse()
        self._stream_ids: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []

    def add_tokens(self, stream_id: int, token_ids: list[int], count: int) -> int:
        """Adds the first `count` tokens or, where there is no room for them, fewer. Returns how many."""
        count = min(count, max(1, self.room_bytes // _TOKEN_BYTES))
        self._stream_ids.append(stream_id)
        self._counts.append(count)
        self._token_ids += token_ids if count == len(token_ids) else token_ids[:count]
        # As `use`, for the entries of which there are most.
        self.room_bytes -= _ENTRY_BYTES + count * _TOKEN_BYTES
        return count

    def complete(self, columns: dict[int, list[int]]) -> decode_pb2.LinkResponse:
        """The message, to which the tokens in `columns` move as far as there is room."""
        counts = list(map(len, columns.values()))
        if len(counts) * _ENTRY_BYTES + sum(counts) * _TOKEN_BYTES <= self.room_bytes:
            self._stream_ids += columns
            self._counts += counts
            self._token_ids += chain.from_iterable(columns.values())
            columns.clear()
        for stream_id in list(columns):
            if self.room_bytes <= 0:
                break
            token_ids = columns.pop(stream_id)
            count = self.add_tokens(stream_id, token_ids, len(token_ids))
            if count < len(token_ids):
                columns[stream_id] = token_ids[count:]
        if self._stream_ids:
            tokens = self.response.tokens
            tokens.stream_ids.extend(self._stream_ids)
            tokens.token_counts.extend(self._counts)
            tokens.token_ids.extend(self._token_ids)
        return self.response

    def use(self, event_bytes: int) -> None:
        """An event of so many bytes was added to `response`."""
        self.room_bytes -= _FRAME_BYTES + event_bytes


@dataclass(eq=False, slots=True)
class OutgoingStream:
    """The unsent events of one request. Once it is dropped, nothing of it is sent."""

    stream_id: int
    credit_tokens: int
    """Those that may be sent."""
    columns: dict[int, list[int]]
    """Tokens by stream that credit allows and that may wait. Their stream has nothing else to send."""
    on_change: Callable[[OutgoingStream], None]
    """Called when it may have events to send."""
    on_columns: Callable[[], None]
    """Called for the first tokens in `columns`."""
    sent_end: bool = field(default=False, init=False)
    is_listed: bool = field(default=False, init=False)
    """Whether `Outgoing` knows that it has something to send."""
    _reserved: decode_pb2.Reserved | None = field(default=None, init=False)
    _times: decode_pb2.AttemptTimes | None = field(default=None, init=False)
    _token_ids: list[int] = field(default_factory=list, init=False)
    _moved_tokens: int = field(default=0, init=False)
    _logprobs: list[sampling_pb2.TokenLogprobs] = field(default_factory=list, init=False)
    _prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    """Those of the prompt that are not sent, last ones first."""
    _finished: decode_pb2.Finished | None = field(default=None, init=False)
    _status: bytes = field(default=b"", init=False)
    _has_end: bool = field(default=False, init=False)

    @property
    def token_count(self) -> int:
        """All tokens that were added."""
        return self._moved_tokens + len(self._token_ids)

    def grant(self, credit_tokens: int) -> None:
        """Allows more tokens."""
        self.credit_tokens += credit_tokens
        self.on_change(self)

    def reserve(self, reserved: decode_pb2.Reserved) -> None:
        """Adds the first event. Replaces an earlier one that is not sent yet."""
        self._reserved = reserved
        self._changed()

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Adds tokens without logprobs."""
        count = len(token_ids)
        if self._token_ids or self.is_listed or not 0 < count <= self.credit_tokens:
            self._token_ids += token_ids
            self._changed()
            return
        self.credit_tokens -= count
        self._moved_tokens += count
        columns = self.columns
        if (waiting := columns.get(self.stream_id)) is not None:
            waiting += token_ids
            return
        if not columns:
            self.on_columns()
        columns[self.stream_id] = [*token_ids]

    def add_first(self, tokens: DecodeTokens, times: decode_pb2.AttemptTimes | None) -> None:
        """Adds tokens. Times go with the next tokens, and replace those that are not sent yet."""
        self._token_ids += tokens.token_ids
        if tokens.logprobs:
            self._logprobs.extend(map(logprobs_to_proto, tokens.logprobs))
        if tokens.prompt_logprobs:
            self._prompt_logprobs = list(reversed(tokens.prompt_logprobs))
        if times is not None:
            self._times = times
        self._changed()

    def finish(self, finished: decode_pb2.Finished) -> None:
        """Adds the end."""
        self._finished = finished
        self._has_end = True
        self._changed()

    def fail(self, status: bytes) -> None:
        """Adds an error as the last event, after the tokens before it."""
        self._status = status
        self._has_end = True
        self._changed()

    def _changed(self) -> None:
        """Its tokens in the columns go before what was added."""
        if waiting := self.columns.pop(self.stream_id, None):
            self._token_ids[:0] = waiting
            self.credit_tokens += len(waiting)
            self._moved_tokens -= len(waiting)
        self.on_change(self)

    def close(self) -> None:
        """Nothing of it goes to the columns any more."""
        self.columns.pop(self.stream_id, None)
        self.credit_tokens = 0

    def try_list(self) -> bool | None:
        """Lists it if `move_to` would move an event. Returns whether all may wait, and None if there is none.

        Tokens after those with its times may wait.
        """
        if self._reserved is None:
            ends = self._has_end and not self.sent_end
            if not (self.credit_tokens > 0 if self._token_ids else ends):
                return None
        self.is_listed = True
        return self._reserved is None and self._times is None and not self._has_end

    def move_to(self, message: _Message) -> None:
        """Moves the events that credit and room allow, at least one. It stays listed while credit allows more."""
        response, stream_id = message.response, self.stream_id
        if self._reserved is not None:
            response.reserved.add(stream_id=stream_id, reserved=self._reserved)
            message.use(0)
            self._reserved = None
        if self._token_ids and self.credit_tokens > 0:
            if self._times is not None:
                response.times.add(stream_id=stream_id, times=self._times)
                message.use(self._times.ByteSize())
                self._times = None
            count = min(self.credit_tokens, len(self._token_ids))
            if self._logprobs or self._prompt_logprobs:
                count = self._move_with_logprobs(message, count)
            else:
                count = message.add_tokens(stream_id, self._token_ids, count)
                del self._token_ids[:count]
            self.credit_tokens -= count
            self._moved_tokens += count
        if self._token_ids or not self._has_end:
            self.is_listed = bool(self._token_ids) and self.credit_tokens > 0
            return
        self.is_listed, self.sent_end = False, True
        self.close()
        if self._finished is not None:
            response.finished.add(stream_id=stream_id, finished=self._finished)
            message.use(self._finished.ByteSize())
        else:
            response.failures.add(stream_id=stream_id, status=self._status)
            message.use(len(self._status))

    def _move_with_logprobs(self, message: _Message, allowed: int) -> int:
        if self._prompt_logprobs:
            return self._move_prompt_logprobs(message)
        count = self._count_with_logprobs(allowed, message.room_bytes)
        tokens = decode_pb2.Tokens(
            token_ids=self._token_ids[:count], logprobs=self._logprobs[:count]
        )
        self._add_with_logprobs(message, tokens)
        return count

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
        self._add_with_logprobs(message, tokens)
        return count

    def _add_with_logprobs(self, message: _Message, tokens: decode_pb2.Tokens) -> None:
        message.response.tokens_with_logprobs.add(stream_id=self.stream_id, tokens=tokens)
        message.use(tokens.ByteSize())
        count = len(tokens.token_ids)
        del self._token_ids[:count], self._logprobs[:count]

    def _count_with_logprobs(self, allowed: int, room_bytes: int) -> int:
        count = 0
        while count < allowed and room_bytes > 0:
            room_bytes -= _TOKEN_BYTES + _ENTRY_BYTES + self._logprobs[count].ByteSize()
            count += 1
        return max(1, count)


class Outgoing:
    """The unsent events of all requests of one link. Pure.

    A request without credit delays no other. Its tokens are kept: an engine yields at most `max_tokens` of them.
    """

    def __init__(self, bytes_max: int, on_sendable: Callable[[], None]) -> None:
        """`bytes_max`: the size from which messages are split. `on_sendable` is called when more may be sent."""
        self._bytes_max = bytes_max
        self._on_sendable = on_sendable
        self._streams: dict[int, OutgoingStream] = {}
        self._queue: dict[int, OutgoingStream] = {}
        self._waiting: dict[int, OutgoingStream] = {}
        """Those with nothing but tokens that may wait, and that are not in the columns."""
        self._columns: dict[int, list[int]] = {}
        self._receipts: dict[int, receipt_pb2.Receipt] = {}
        """Those of streams, which follow the last event of their stream."""

    @property
    def count(self) -> int:
        """Requests of which the last event is not sent."""
        return len(self._streams)

    @property
    def has_waiting(self) -> bool:
        """Whether there are tokens that may wait."""
        return bool(self._columns or self._waiting)

    def open(self, stream_id: int, credit_tokens: int) -> OutgoingStream:
        """Adds a request."""
        stream = OutgoingStream(
            stream_id, credit_tokens, self._columns, self._enqueue, self._on_sendable
        )
        self._streams[stream_id] = stream
        return stream

    def grant(self, stream_id: int, credit_tokens: int) -> None:
        """Allows more tokens of a request. No effect for one of which everything is sent."""
        if (stream := self._streams.get(stream_id)) is not None:
            stream.grant(credit_tokens)

    def drop(self, stream_id: int) -> None:
        """Forgets a request."""
        if (stream := self._streams.pop(stream_id, None)) is not None:
            stream.close()
        self._queue.pop(stream_id, None)
        self._waiting.pop(stream_id, None)
        self._on_sendable()

    def add_receipt(self, stream_id: int, receipt: receipt_pb2.Receipt) -> None:
        """A request has this receipt after its last event. One of no cost is not sent."""
        if receipt.prefill_device_us or receipt.decode_device_us:
            self._receipts[stream_id] = receipt
            self._on_sendable()

    def next_message(self, *, holds_tokens: bool = False) -> decode_pb2.LinkResponse | None:
        """The next message: each request once, and as many events as fit. None when nothing may be sent.

        `on_sendable` is called for what is left. `holds_tokens` leaves tokens that may wait for a later message.
        """
        if not holds_tokens:
            self._queue |= self._waiting
            self._waiting.clear()
        columns = {} if holds_tokens else self._columns
        if not self._queue and not columns and self._receipts.keys() <= self._streams.keys():
            return None
        message, queue = _Message(self._bytes_max), iter(self._queue.items())
        unfinished: dict[int, OutgoingStream] = {}
        while message.room_bytes > 0 and (one := next(queue, None)) is not None:
            stream_id, stream = one
            stream.move_to(message)
            if stream.is_listed:
                unfinished[stream_id] = stream
            elif stream.sent_end:
                del self._streams[stream_id]
        # Those that had no turn go first.
        self._queue = dict(queue) | unfinished
        for stream_id in self._receipts.keys() - self._streams.keys():
            if message.room_bytes <= 0:
                break
            receipt = self._receipts.pop(stream_id)
            message.response.receipts.add(stream_id=stream_id, receipt=receipt)
            message.use(receipt.ByteSize())
        response = message.complete(columns)
        if self._queue or message.room_bytes <= 0:
            self._on_sendable()
        return response

    def _enqueue(self, stream: OutgoingStream) -> None:
        self._on_sendable()
        stream_id = stream.stream_id
        dropped = stream_id not in self._streams
        if dropped or stream_id in self._queue or (may_wait := stream.try_list()) is None:
            return
        if may_wait:
            self._waiting[stream_id] = stream
        else:
            self._waiting.pop(stream_id, None)
            self._queue[stream_id] = stream


class TokenPace:
    """Lets tokens go at most once in the interval that the router asks for."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        """`on_due` is called when tokens that have waited may go."""
        self._on_due = on_due
        self.interval_s = 0.0
        self._due_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set_interval(self, interval_s: float) -> None:
        """Changes the interval, also for tokens that wait now."""
        if interval_s == self.interval_s:
            return
        self._due_s += interval_s - self.interval_s
        self.interval_s = interval_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._on_due()

    def try_release(self) -> bool:
        """Whether the tokens that wait may go now. If not, `on_due` will be called."""
        if self._timer is not None:
            return False
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if now_s < self._due_s:
            self._timer = loop.call_at(self._due_s, self._end_wait)
            return False
        self._due_s = now_s + self.interval_s
        return True

    def close(self) -> None:
        """Calls `on_due` no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_wait(self) -> None:
        self._timer = None
        # The timer may be early by less than the resolution of the loop's clock.
        self._due_s = -math.inf
        self._on_due()


Write: TypeAlias = Callable[[decode_pb2.LinkResponse], Awaitable[Any]]


class LinkWriter:
    """Sends the events of all requests of a link together, once in a turn of the event loop.

    While a message is written, events gather for the next one, and for `JOIN_S` where the router is busy. Tokens after
    the first ones of a request also wait for the interval that the router asks for.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._wake = asyncio.Event()
        self.outgoing = Outgoing(LINK_MESSAGE_BYTES_MAX, self._wake.set)
        self.pace = TokenPace(self._wake.set)
        self._finishing = self._stopping = False
        self._refusal: HeadraceError | None = None

    async def run(self) -> None:
        """Sends until it is stopped, or nothing is left of the last requests. Raises the refusal of `finish` then."""
        outgoing, wake = self.outgoing, self._wake
        while not self._stopping and (wake.is_set() or outgoing.count or not self._finishing):
            await wake.wait()
            if self.pace.interval_s > GAP_MIN_S:
                # Each message costs a busy router more than all that is in it.
                await asyncio.sleep(JOIN_S)
            wake.clear()
            holds_tokens = outgoing.has_waiting and not self.pace.try_release()
            message = outgoing.next_message(holds_tokens=holds_tokens)
            if message is not None and not self._stopping:
                await self._write(message)
        if self._refusal is not None and not self._stopping:
            raise self._refusal

    def finish(self, refusal: HeadraceError | None = None) -> None:
        """The requests that are left are the last."""
        self._finishing, self._refusal = True, refusal or self._refusal
        self._wake.set()

    def stop(self) -> None:
        """Begins no other message."""
        self._stopping = True
        self.pace.close()
        self._wake.set()
