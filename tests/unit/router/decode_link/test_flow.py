"""Both ends of a link without gRPC: whatever the order of events, every reader gets its tokens, once and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from google.rpc import status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.decode.v1 import decode_pb2
from headrace_common.errors import HeadraceError, ProtocolViolation, TransferFailed
from headrace_common.rpc.status import status_of
from headrace_decode.link.outgoing import Outgoing, OutgoingStream
from headrace_engine.interface import DecodeTokens, TokenLogprobs
from headrace_router.decode_link.answer import LinkedAnswers
from headrace_router.decode_link.link import OutgoingRequests
from tests.kit.link import AnswerEvent, KeptEvents

_STREAMS = (1, 2, 3, 4)
# Requests of which each token has logprobs.
_WITH_LOGPROBS = (2,)
_SLOW = 4

_EVENTS = st.one_of(
    st.tuples(st.just("generate"), st.sampled_from(_STREAMS), st.integers(1, 9)),
    st.tuples(st.just("read"), st.sampled_from(_STREAMS), st.just(0)),
    st.tuples(st.just("up"), st.just(0), st.integers(0, 1)),
    st.tuples(st.just("down"), st.just(0), st.just(0)),
    st.tuples(st.just("finish"), st.sampled_from(_STREAMS), st.just(0)),
    st.tuples(st.just("fail"), st.sampled_from(_STREAMS), st.just(0)),
    st.tuples(st.just("cancel"), st.sampled_from(_STREAMS), st.just(0)),
)


class _Reader(KeptEvents):
    """Has room for no more while it has an event, and returns credit with the last one."""

    def __init__(self, stream_id: int, window: int, grant: Callable[[int, int], None]) -> None:
        super().__init__(has_room=False)
        self.opened(stream_id, window, grant)

    def poll(self) -> AnswerEvent | None:
        event = super().poll()
        if not self._events:
            self.return_credit()
        return event


class _Link:
    """The pure parts of both ends, and messages on their way."""

    def __init__(self, window: int, bytes_max: int) -> None:
        self.window = window
        self.worker = Outgoing(bytes_max, lambda: None)
        self.streams: dict[int, OutgoingStream] = {}
        self.answers = LinkedAnswers()
        self.router = OutgoingRequests(bytes_max)
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.readers: dict[int, _Reader] = {}
        self.generated: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.read_tokens: dict[int, list[int]] = {}
        self.read_ends: dict[int, str] = {}
        self.cancelled: set[int] = set()
        for stream_id in _STREAMS:
            reader = self.readers[stream_id] = _Reader(stream_id, window, self._grant)
            self.answers.add(reader)
            stream = self.streams[stream_id] = self.worker.open(stream_id, window)
            stream.reserve(decode_pb2.Reserved(start_token=stream_id))
            self.generated[stream_id], self.read_tokens[stream_id] = [], []

    def _grant(self, stream_id: int, tokens: int) -> None:
        if stream_id in self.answers.by_stream:
            self.router.grant(stream_id, tokens)

    def apply(self, kind: str, stream_id: int, count: int) -> None:
        match kind:
            case "generate" if stream_id not in self.ends:
                self._generate(stream_id, count)
            case "read":
                self.read(stream_id)
            case "up" if self.up:
                self.answers.receive(decode_pb2.LinkResponse.FromString(self.up.popleft()))
            case "up":
                self.send_up(holds_tokens=bool(count))
            case "down" if self.down:
                self._receive_down(decode_pb2.LinkRequest.FromString(self.down.popleft()))
            case "down":
                self.send_down()
            case "finish" if stream_id not in self.ends:
                self.ends[stream_id] = "finished"
                finished = decode_pb2.Finished(cached_tokens=stream_id)
                self.streams[stream_id].finish(finished)
            case "fail" if stream_id not in self.ends:
                self.ends[stream_id] = "TRANSFER_FAILED"
                status: status_pb2.Status = status_of(TransferFailed("gone"))
                self.streams[stream_id].fail(status.SerializeToString())
            case "cancel":
                if self.answers.remove(stream_id) is not None:
                    self.router.cancel(stream_id)
                    self.cancelled.add(stream_id)

    def _generate(self, stream_id: int, count: int) -> None:
        known = self.generated[stream_id]
        new = range(len(known), len(known) + count)
        known += new
        stream = self.streams[stream_id]
        for token in new:
            if stream_id in _WITH_LOGPROBS:
                logprobs = (TokenLogprobs(-float(token), ()),)
                stream.add_first(DecodeTokens((token,), logprobs), None)
            else:
                stream.add_tokens([token])

    def read(self, stream_id: int) -> bool:
        """Reads one event. False when there is none, or none is left."""
        if stream_id in self.read_ends or stream_id in self.cancelled:
            return False
        try:
            event = self.readers[stream_id].poll()
        except HeadraceError as error:
            self.read_ends[stream_id] = error.reason
            return False
        if event is None:
            return False
        match event:
            case decode_pb2.Reserved():
                assert not self.read_tokens[stream_id]
                assert event.start_token == stream_id
            case decode_pb2.Tokens():
                assert len(event.token_ids) <= self.window
                self.read_tokens[stream_id] += event.token_ids
                if stream_id in _WITH_LOGPROBS:
                    expected = [-float(token) for token in event.token_ids]
                    assert [entry.logprob for entry in event.logprobs] == expected
            case decode_pb2.Finished():
                assert event.cached_tokens == stream_id
                self.read_ends[stream_id] = "finished"
        return True

    def send_up(self, *, holds_tokens: bool = False) -> bool:
        message = self.worker.next_message(holds_tokens=holds_tokens)
        if message is not None:
            self.up.append(message.SerializeToString())
        return message is not None

    def send_down(self) -> bool:
        message = self.router.next_message()
        if message is not None:
            self.down.append(message.SerializeToString())
        return message is not None

    def _receive_down(self, message: decode_pb2.LinkRequest) -> None:
        for credit in message.credits:
            self.worker.grant(credit.stream_id, credit.credit_tokens)
        for stream_id in message.cancelled_stream_ids:
            self.worker.drop(stream_id)

    def settle(self, readers: tuple[int, ...]) -> None:
        """Delivers and reads until nothing happens."""
        moved = True
        while moved:
            moved = self.send_up() | self.send_down()
            while self.up or self.down:
                self.apply("up" if self.up else "down", 0, 0)
            for stream_id in readers:
                while self.read(stream_id):
                    moved = True


@settings(max_examples=100, deadline=None)
@given(
    st.lists(_EVENTS, max_size=120), st.sampled_from((2, 3, 8, 64)), st.sampled_from((80, 10**6))
)
def test_no_token_is_lost_doubled_or_out_of_order(
    events: list[tuple[Any, int, int]], window: int, bytes_max: int
) -> None:
    link = _Link(window, bytes_max)
    for event in events:
        link.apply(*event)
        for stream_id, token_ids in link.read_tokens.items():
            assert token_ids == link.generated[stream_id][: len(token_ids)]
    # The slow one reads nothing while all the others end.
    others = tuple(stream_id for stream_id in _STREAMS if stream_id != _SLOW)
    for stream_id in _STREAMS:
        link.apply("finish", stream_id, 0)
    link.settle(others)
    for readers in (others, _STREAMS):
        link.settle(readers)
        for stream_id in set(readers) - link.cancelled:
            assert link.read_tokens[stream_id] == link.generated[stream_id]
            assert link.read_ends[stream_id] == link.ends[stream_id]
    assert link.worker.count == 0
    assert not link.answers.by_stream


@pytest.mark.parametrize("counts", [[2], [1, 1], [2, 2], []])
def test_columns_of_different_length_are_found_out(counts: list[int]) -> None:
    tokens = decode_pb2.LinkTokens(stream_ids=[1, 2], token_counts=counts, token_ids=range(3))
    with pytest.raises(ProtocolViolation, match="columns"):
        LinkedAnswers().receive(decode_pb2.LinkResponse(tokens=tokens))
