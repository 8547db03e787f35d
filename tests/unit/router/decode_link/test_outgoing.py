"""What a router sends on a link: joined, in order, split by size."""

from __future__ import annotations

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import image_pb2, inference_pb2
from headrace_router.decode_link.link import OutgoingRequests


def opening(stream_id: int, tokens: int = 1) -> tuple[decode_pb2.LinkOpen, inference_pb2.TokenIds]:
    request = decode_pb2.GenerateRequest(transfer_id=f"transfer {stream_id}")
    opened = decode_pb2.LinkOpen(stream_id=stream_id, request=request)
    return opened, inference_pb2.TokenIds(ids=[2**28] * tokens)


def test_a_request_that_is_cancelled_before_it_is_sent_is_never_sent() -> None:
    outgoing = OutgoingRequests(10_000)
    outgoing.open(*opening(1))
    outgoing.grant(1, 5)
    outgoing.cancel(1)
    assert outgoing.next_message() is None


def test_long_messages_are_split_and_a_long_request_goes_alone() -> None:
    outgoing = OutgoingRequests(1_000)
    sizes = [10, 150, 10, 400, 10]
    for stream_id, tokens in enumerate(sizes, 1):
        outgoing.open(*opening(stream_id, tokens))
    for stream_id in range(100, 200):
        outgoing.cancel(stream_id)
    opens: list[list[int]] = []
    cancels: list[int] = []
    while (message := outgoing.next_message()) is not None:
        opens.append([one.stream_id for one in message.opens])
        cancels += message.cancelled_stream_ids
        assert all(len(one.request.token_ids) == sizes[one.stream_id - 1] for one in message.opens)
        assert message.ByteSize() <= 1_000 or len(message.opens) == 1
    assert [stream_id for ids in opens for stream_id in ids] == [1, 2, 3, 4, 5]
    assert [4] in opens
    assert cancels == list(range(100, 200))


def test_a_request_with_images_goes_alone_with_them() -> None:
    outgoing = OutgoingRequests(1_000)
    image = image_pb2.PromptImage(data=bytes(5_000))
    outgoing.open(*opening(1))
    outgoing.open(*opening(2), (image,))
    outgoing.open(*opening(3))
    opens = []
    while (message := outgoing.next_message()) is not None:
        opens.append([(one.stream_id, len(one.request.images)) for one in message.opens])
    assert opens == [[(1, 0)], [(2, 1)], [(3, 0)]]


def test_the_interval_between_tokens_goes_with_the_next_message() -> None:
    outgoing = OutgoingRequests(10_000)
    assert not outgoing.set_token_interval(0)
    assert outgoing.next_message() is None
    assert outgoing.set_token_interval(2_000)
    message = outgoing.next_message()
    assert message is not None
    assert message.token_interval_us == 2_000
    assert not outgoing.set_token_interval(2_000)
    assert outgoing.next_message() is None
    assert not outgoing.set_token_interval(3_000), "a small change waits for another message"
    outgoing.open(*opening(1))
    message = outgoing.next_message()
    assert message is not None
    assert (message.token_interval_us, len(message.opens)) == (3_000, 1)
    outgoing.open(*opening(2))
    message = outgoing.next_message()
    assert message is not None
    assert not message.HasField("token_interval_us")
    assert outgoing.set_token_interval(1_500)
    assert outgoing.set_token_interval(0)
