"""The worker's events of one link: joined, within credit, in order, split by size."""

from __future__ import annotations

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import receipt_pb2
from headrace_decode.link.outgoing import Outgoing, OutgoingStream
from headrace_engine.interface import DecodeTokens, TokenLogprobs
from headrace_router.decode_link.answer import LinkedAnswers
from tests.kit.link import KeptEvents

_END = decode_pb2.Finished(cached_tokens=3)


def opened(
    *stream_ids: int, bytes_max: int = 1_000_000
) -> tuple[Outgoing, dict[int, OutgoingStream]]:
    """With credit for all tokens of the streams."""
    outgoing = Outgoing(bytes_max, lambda: None)
    return outgoing, {stream_id: outgoing.open(stream_id, 10_000) for stream_id in stream_ids}


def columns(message: decode_pb2.LinkResponse | None) -> dict[int, list[int]]:
    """The tokens of a message by request."""
    assert message is not None
    token_ids = list(message.tokens.token_ids)
    found: dict[int, list[int]] = {}
    for stream_id, count in zip(
        message.tokens.stream_ids, message.tokens.token_counts, strict=True
    ):
        found[stream_id], token_ids = token_ids[:count], token_ids[count:]
    assert not token_ids
    return found


def test_a_step_of_all_requests_is_one_message() -> None:
    outgoing, streams = opened(1, 2, 3)
    streams[3].reserve(decode_pb2.Reserved(start_token=5, end_token=7))
    streams[1].add_tokens([10])
    streams[1].add_tokens([11])
    streams[2].add_tokens([20])
    streams[2].finish(_END)
    message = outgoing.next_message()
    assert columns(message) == {1: [10, 11], 2: [20]}
    assert message is not None
    assert [(one.stream_id, one.reserved.start_token) for one in message.reserved] == [(3, 5)]
    assert [(one.stream_id, one.finished) for one in message.finished] == [(2, _END)]
    assert outgoing.next_message() is None
    assert outgoing.count == 2


def test_a_message_is_split_and_requests_take_turns() -> None:
    outgoing, streams = opened(1, 2, bytes_max=1_000)
    streams[1].add_tokens(range(2**28, 2**28 + 500))
    streams[2].add_tokens([20])
    seen: dict[int, list[int]] = {1: [], 2: []}
    messages = []
    while (message := outgoing.next_message()) is not None:
        assert message.ByteSize() <= 1_000 + 100
        messages.append(columns(message))
        for stream_id, token_ids in messages[-1].items():
            seen[stream_id] += token_ids
    assert seen == {1: list(range(2**28, 2**28 + 500)), 2: [20]}
    assert len(messages) >= 3
    assert 2 in messages[1], "the second request waited for the rest of the first"


@pytest.mark.parametrize("logprobs", [False, True])
async def test_the_logprobs_of_a_prompt_are_split_and_precede_its_tokens(logprobs: bool) -> None:
    entries = tuple(TokenLogprobs(-float(n), ((n, -0.5),) * 3, n) for n in range(1, 100))
    outgoing, streams = opened(1, bytes_max=1_000)
    own = (TokenLogprobs(-0.1, ()), TokenLogprobs(-0.2, ())) if logprobs else ()
    streams[1].add_first(DecodeTokens((10, 11), own, prompt_logprobs=entries), None)
    streams[1].finish(_END)
    answers, answer = LinkedAnswers(), KeptEvents()
    answer.opened(1, 9, lambda stream_id, tokens: None)
    answers.add(answer)
    sizes: list[int] = []
    found = decode_pb2.Tokens()
    while (message := outgoing.next_message()) is not None:
        sizes.append(message.ByteSize())
        answers.receive(message)
        if isinstance(tokens := answer.poll(), decode_pb2.Tokens):
            found.MergeFrom(tokens)
            assert len(found.prompt_logprobs) == len(entries)
    assert len(sizes) > 4
    assert max(sizes) < 1_200
    assert [entry.rank for entry in found.prompt_logprobs] == list(range(1, 100))
    assert list(found.token_ids) == [10, 11]
    assert [entry.logprob for entry in found.logprobs] == ([-0.1, -0.2] if logprobs else [])
    assert answer.poll() == _END


def test_a_receipt_follows_the_last_event_of_its_request() -> None:
    outgoing, streams = opened(1, bytes_max=1_000)
    cost = receipt_pb2.Receipt(decode_device_us=5)
    streams[1].credit_tokens = 1
    streams[1].add_tokens([10, 11])
    streams[1].fail(b"x")
    outgoing.add_receipt(1, cost)
    assert columns(outgoing.next_message()) == {1: [10]}
    assert outgoing.next_message() is None
    streams[1].grant(1)
    message = outgoing.next_message()
    assert message is not None
    assert [one.stream_id for one in message.failures] == [1]
    assert [(one.stream_id, one.receipt) for one in message.receipts] == [(1, cost)]
    for stream_id in range(2, 500):
        outgoing.add_receipt(stream_id, cost)
    sizes: list[int] = []
    while (message := outgoing.next_message()) is not None:
        sizes.append(message.ByteSize())
    assert len(sizes) > 4
    assert max(sizes) < 1_200


def test_what_is_left_of_a_full_message_is_sendable() -> None:
    calls: list[bool] = []
    outgoing = Outgoing(1, lambda: calls.append(True))
    receipt = receipt_pb2.Receipt(decode_device_us=1)
    for stream_id in (1, 2):
        stream = outgoing.open(stream_id, 9)
        stream.add_tokens([5])
        stream.fail(b"status")
        outgoing.add_receipt(stream_id, receipt)
    sent = []
    # One event in each message: two of tokens with their end, and two receipts.
    while calls:
        calls.clear()
        if (message := outgoing.next_message()) is not None:
            sent.append((len(message.failures), len(message.receipts)))
    assert sent == [(1, 0), (1, 0), (0, 1), (0, 1)]
