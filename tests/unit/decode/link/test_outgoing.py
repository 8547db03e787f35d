"""The worker's events of one link: joined, within credit, in order, split by size."""

from __future__ import annotations

from headrace.decode.v1 import decode_pb2
from headrace_decode.link.outgoing import Outgoing
from headrace_engine.interface import DecodeTokens, TokenLogprobs

_END = decode_pb2.Finished(cached_tokens=3)


def opened(*streams: tuple[int, int], bytes_max: int = 1_000_000) -> Outgoing:
    """With streams of (id, credit)."""
    outgoing = Outgoing(bytes_max)
    for stream_id, credit in streams:
        outgoing.open(stream_id, credit)
    return outgoing


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
    outgoing = opened((1, 9), (2, 9), (3, 9))
    outgoing.reserve(3, decode_pb2.Reserved(start_token=5, end_token=7))
    outgoing.add_tokens(1, [DecodeTokens((10,)), DecodeTokens((11,))])
    outgoing.add_tokens(2, [DecodeTokens((20,))])
    outgoing.finish(2, _END)
    message = outgoing.next_message()
    assert columns(message) == {1: [10, 11], 2: [20]}
    assert message is not None
    assert [(one.stream_id, one.reserved.start_token) for one in message.reserved] == [(3, 5)]
    assert [(one.stream_id, one.finished) for one in message.finished] == [(2, _END)]
    assert outgoing.next_message() is None
    assert outgoing.count == 2


def test_a_request_without_credit_delays_only_itself() -> None:
    outgoing = opened((1, 1), (2, 9))
    outgoing.add_tokens(1, [DecodeTokens((10, 11, 12))])
    outgoing.finish(1, _END)
    outgoing.add_tokens(2, [DecodeTokens((20, 21))])
    assert columns(outgoing.next_message()) == {1: [10], 2: [20, 21]}
    outgoing.add_tokens(2, [DecodeTokens((22,))])
    assert columns(outgoing.next_message()) == {2: [22]}
    outgoing.grant(1, 1)
    message = outgoing.next_message()
    assert columns(message) == {1: [11]}
    assert message is not None
    assert not message.finished
    outgoing.grant(1, 5)
    message = outgoing.next_message()
    assert columns(message) == {1: [12]}
    assert message is not None
    assert [one.stream_id for one in message.finished] == [1]
    assert outgoing.count == 1


def test_an_error_follows_the_tokens_before_it() -> None:
    outgoing = opened((1, 1))
    outgoing.add_tokens(1, [DecodeTokens((10, 11))])
    outgoing.fail(1, b"status")
    message = outgoing.next_message()
    assert message is not None
    assert not message.failures
    outgoing.grant(1, 1)
    message = outgoing.next_message()
    assert columns(message) == {1: [11]}
    assert message is not None
    assert [(one.stream_id, one.status) for one in message.failures] == [(1, b"status")]
    assert outgoing.count == 0


def test_nothing_more_is_sent_for_a_dropped_request() -> None:
    outgoing = opened((1, 9), (2, 9))
    outgoing.add_tokens(1, [DecodeTokens((10,))])
    outgoing.add_tokens(2, [DecodeTokens((20,))])
    outgoing.drop(1)
    outgoing.add_tokens(1, [DecodeTokens((11,))])
    outgoing.grant(1, 5)
    outgoing.fail(1, b"late")
    assert columns(outgoing.next_message()) == {2: [20]}
    assert outgoing.next_message() is None


def test_a_message_is_split_and_requests_take_turns() -> None:
    outgoing = opened((1, 10_000), (2, 10_000), bytes_max=1_000)
    outgoing.add_tokens(1, [DecodeTokens(tuple(range(2**28, 2**28 + 500)))])
    outgoing.add_tokens(2, [DecodeTokens((20,))])
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


def test_logprobs_travel_with_their_tokens() -> None:
    outgoing = opened((1, 3), (2, 9), bytes_max=100_000)
    outgoing.add_tokens(
        1,
        [
            DecodeTokens((n,), (TokenLogprobs(-float(n), ((n, -float(n)), (99, -9.0))),))
            for n in range(5)
        ],
    )
    outgoing.add_tokens(2, [DecodeTokens((20,))])
    message = outgoing.next_message()
    assert columns(message) == {2: [20]}
    assert message is not None
    (one,) = message.tokens_with_logprobs
    assert one.stream_id == 1
    assert list(one.tokens.token_ids) == [0, 1, 2]
    assert [entry.logprob for entry in one.tokens.logprobs] == [-0.0, -1.0, -2.0]
    assert [len(entry.alternatives) for entry in one.tokens.logprobs] == [2, 2, 2]
    outgoing.grant(1, 9)
    message = outgoing.next_message()
    assert message is not None
    assert list(message.tokens_with_logprobs[0].tokens.token_ids) == [3, 4]


def test_many_logprobs_are_split_by_size() -> None:
    outgoing = opened((1, 1_000), bytes_max=2_000)
    alternatives = tuple((n, -1.0) for n in range(20))
    outgoing.add_tokens(
        1, [DecodeTokens((n,), (TokenLogprobs(-1.0, alternatives),)) for n in range(50)]
    )
    token_ids: list[int] = []
    while (message := outgoing.next_message()) is not None:
        assert message.ByteSize() < 2_500
        token_ids += message.tokens_with_logprobs[0].tokens.token_ids
    assert token_ids == list(range(50))


def test_times_go_with_the_next_tokens() -> None:
    outgoing = opened((1, 1))
    outgoing.add_times(1, decode_pb2.AttemptTimes(reserved_us=5))
    assert outgoing.next_message() is None
    outgoing.add_tokens(1, [DecodeTokens((10, 11))])
    message = outgoing.next_message()
    assert message is not None
    assert [(one.stream_id, one.times.reserved_us) for one in message.times] == [(1, 5)]
    outgoing.grant(1, 1)
    message = outgoing.next_message()
    assert columns(message) == {1: [11]}
    assert message is not None
    assert not message.times


def test_tokens_may_wait_after_those_with_their_times() -> None:
    outgoing = opened((1, 9), (2, 9))
    for stream_id in (1, 2):
        outgoing.add_times(stream_id, decode_pb2.AttemptTimes(reserved_us=5))
    outgoing.add_tokens(1, [DecodeTokens((10,))])
    assert columns(outgoing.next_message(holds_tokens=True)) == {1: [10]}
    outgoing.add_tokens(1, [DecodeTokens((11,))])
    assert outgoing.next_message(holds_tokens=True) is None
    outgoing.add_tokens(2, [DecodeTokens((20,))])
    assert columns(outgoing.next_message(holds_tokens=True)) == {2: [20]}
    outgoing.add_tokens(1, [DecodeTokens((12,))])
    outgoing.add_tokens(2, [DecodeTokens((21,))])
    waited = outgoing.has_waiting
    assert columns(outgoing.next_message()) == {1: [11, 12], 2: [21]}
    assert waited
    assert not outgoing.has_waiting


def test_an_end_takes_the_tokens_along_that_wait() -> None:
    outgoing = opened((1, 9), (2, 9), (3, 9))
    for stream_id in (1, 2, 3):
        outgoing.add_tokens(stream_id, [DecodeTokens((10 * stream_id,))])
    assert outgoing.next_message(holds_tokens=True) is None
    outgoing.finish(1, _END)
    outgoing.fail(2, b"status")
    message = outgoing.next_message(holds_tokens=True)
    assert columns(message) == {1: [10], 2: [20]}
    assert message is not None
    assert [one.stream_id for one in message.finished] == [1]
    assert [one.stream_id for one in message.failures] == [2]
    outgoing.drop(3)
    assert not outgoing.has_waiting
    assert outgoing.next_message() is None


def test_the_rest_of_a_split_message_does_not_wait() -> None:
    outgoing = opened((1, 10_000), bytes_max=1_000)
    outgoing.add_tokens(1, [DecodeTokens(tuple(range(2**28, 2**28 + 500)))])
    token_ids = columns(outgoing.next_message())[1]
    assert len(token_ids) < 500
    while (message := outgoing.next_message(holds_tokens=True)) is not None:
        token_ids += columns(message)[1]
    assert len(token_ids) == 500
