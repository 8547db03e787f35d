"""Statuses of errors are bounded in size and name fields that are not UTF-8."""

from __future__ import annotations

from typing import Any

from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import DecodeFull, InvalidRequest, TransferTimeout
from headrace_common.rpc.status import DOMAIN, invalid_text_fields, status_of

REQUEST = inference_pb2.GenerateRequest.DESCRIPTOR
MARK = "\u2603"
# A few characters of each length in UTF-8. Hypothesis needs a second of CPU to list all characters, the first time.
TEXTS = st.text(alphabet="\0a\n\x7f\xdf\u07ff\u20ac\uffff\U0001f600\U0010ffff", max_size=20)


def spoiled(request: inference_pb2.GenerateRequest) -> bytes:
    """The request's bytes, with every snowman (three bytes) replaced by bytes that are not UTF-8."""
    return request.SerializeToString().replace(MARK.encode(), b"\xff\xfe\xfd")


@given(
    text=TEXTS,
    request_id=TEXTS,
    stop=st.lists(TEXTS, max_size=4),
    contents=st.lists(TEXTS, min_size=1, max_size=5),
    data=st.data(),
)
def test_exactly_the_invalid_fields_are_named(
    text: str, request_id: str, stop: list[str], contents: list[str], data: st.DataObject
) -> None:
    paths = ["text", "request_id"]
    paths += [f"sampling.stop[{i}]" for i in range(len(stop))]
    paths += [f"chat.messages[{i}].content" for i in range(len(contents))]
    bad = data.draw(st.sets(st.sampled_from(paths)))

    def value(path: str, good: str) -> str:
        return good + MARK if path in bad else good

    request = inference_pb2.GenerateRequest(
        text=value("text", text), request_id=value("request_id", request_id)
    )
    request.sampling.stop.extend(value(f"sampling.stop[{i}]", s) for i, s in enumerate(stop))
    for i, content in enumerate(contents):
        request.chat.messages.add(
            role="user", content=value(f"chat.messages[{i}].content", content)
        )
    assert set(invalid_text_fields(spoiled(request), REQUEST)) == bad


@given(st.binary(max_size=200))
def test_random_bytes_never_raise(data: bytes) -> None:
    for path in invalid_text_fields(data, REQUEST):
        assert path


def test_a_wrong_text_far_from_the_beginning_is_not_searched() -> None:
    class Counted(bytes):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(index)

    message = b"\x0a\x03\x12\x01a"
    wrong = b"\x0a\x03\x12\x01\xff"
    for before, found in ((10, ["messages[10].content"]), (100_000, [])):
        Counted.reads = 0
        data = Counted(message * before + wrong)
        assert invalid_text_fields(data, inference_pb2.Chat.DESCRIPTOR) == found
        assert Counted.reads < 2_000


def test_the_search_ends_at_a_depth_limit() -> None:
    data = b"\x0a\x01\xff"
    for _ in range(100):
        data = b"\x1a" + bytes([len(data) & 0x7F]) + data[:0x7F]
    invalid_text_fields(data, REQUEST)


@given(
    st.text(max_size=5_000),
    st.dictionaries(st.text(max_size=300), st.text(max_size=3_000), max_size=50),
)
def test_a_status_always_fits_into_trailers(detail: str, metadata: dict[str, str]) -> None:
    status = status_of(TransferTimeout(detail, metadata=metadata))
    assert status.ByteSize() < 3_500
    invalid = status_of(InvalidRequest(metadata))
    assert invalid.ByteSize() < 5_500


def test_details_have_reason_domain_and_retry_delay() -> None:
    status = status_of(DecodeFull("no room for 12 blocks", metadata={"blocks": "12"}))
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, info.domain) == ("DECODE_FULL", DOMAIN)
    assert dict(info.metadata) == {"blocks": "12"}
    assert retry.retry_delay.ToMilliseconds() == 500
