"""Messages with too many fields are rejected before protobuf parses them, and no other messages are."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.rpc.wire_fields import require_few_fields

_TYPE = inference_pb2.GenerateRequest.DESCRIPTOR


def _fields(message: Any) -> int:
    """The fields of a message, counted from its object."""
    count = 0
    for field, value in message.ListFields():
        values = value if field.is_repeated and not field.is_packed else [value]
        count += len(values)
        if field.message_type is not None:
            count += sum(map(_fields, values))
    return count


_texts = st.text(max_size=3)
_messages = st.builds(
    inference_pb2.GenerateRequest,
    model=_texts,
    text=st.none() | _texts,
    chat=st.builds(
        inference_pb2.Chat,
        messages=st.lists(st.builds(inference_pb2.ChatMessage, role=_texts, content=_texts)),
    ),
    tokens=st.builds(inference_pb2.TokenIds, ids=st.lists(st.integers(0, 2**32 - 1))),
    sampling=st.builds(
        sampling_pb2.SamplingParams,
        stop=st.lists(_texts),
        seed=st.none() | st.integers(0, 2**64 - 1),
        temperature=st.none() | st.floats(0, 1),
    ),
)


@given(_messages)
def test_fields_are_counted_as_protobuf_has_them(message: inference_pb2.GenerateRequest) -> None:
    data, count = message.SerializeToString(), _fields(message)
    require_few_fields(data, _TYPE, count)
    # A field has two bytes at least, so a short message is not counted.
    if count and len(data) > 2 * (count - 1):
        with pytest.raises(InvalidRequest):
            require_few_fields(data, _TYPE, count - 1)


@given(st.binary(max_size=60), st.integers(0, 30))
def test_the_count_of_any_bytes_ends_and_is_never_too_low(data: bytes, fields_max: int) -> None:
    try:
        require_few_fields(data, _TYPE, fields_max)
    except InvalidRequest:
        return
    message = inference_pb2.GenerateRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    # Unpacked numbers are more fields on the wire than in the object.
    assert _fields(message) <= max(fields_max, len(data) // 2)
