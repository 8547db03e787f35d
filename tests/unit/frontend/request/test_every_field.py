"""Every field of GenerateRequest over gRPC, with values at its bounds: a request is prepared, or the field is named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import InvalidRequest
from headrace_frontend.request.validation import PreparedRequest
from tests.kit.requests import prepared

CONTEXT: Final = 512
DEPTH_MAX: Final = 4
VALUES: Final[dict[int, tuple[Any, ...]]] = {
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, 0.5, -1.0, 1e300, math.inf, math.nan),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, 0.5, -1.0, 3e38, math.inf, math.nan),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, -1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**64 - 1),
    FieldDescriptor.CPPTYPE_STRING: ("", "sim", "{}", "[", "\x00", "{" * 2_000, "x" * 20_000),
}


def leaves(kind: Descriptor, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[Any]:
    """The paths of fields without fields of their own."""
    for field in kind.fields:
        named = (*path, field)
        inner = field.message_type
        if inner is None:
            yield named
        elif not inner.GetOptions().map_entry and len(named) < DEPTH_MAX:
            yield from leaves(inner, named)


LEAVES: Final = list(leaves(inference_pb2.GenerateRequest.DESCRIPTOR))


def request_with(path: tuple[FieldDescriptor, ...], value: Any) -> inference_pb2.GenerateRequest:
    """A valid request but for one field. Raises ValueError for a value that no message can have."""
    request = inference_pb2.GenerateRequest()
    if path[0].name == "chat":
        request.chat.messages.add(role="user", content="hi")
    elif path[0].name not in ("text", "tokens"):
        request.text = "hi"
    message: Any = request
    for field in path[:-1]:
        inner = getattr(message, field.name)
        if not field.is_repeated:
            message = inner
        elif field.name == "messages":
            message = inner[0]
        else:
            message = inner.add()
    name = path[-1].name
    if path[-1].is_repeated:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)
    return request


@pytest.mark.parametrize("path", LEAVES, ids=lambda path: ".".join(field.name for field in path))
def test_a_request_is_prepared_or_a_field_is_named(path: tuple[FieldDescriptor, ...]) -> None:
    for value in VALUES[path[-1].cpp_type]:
        request = request_with(path, value)
        found: PreparedRequest | None = None
        violations: Mapping[str, str] = {}
        try:
            found = prepared(request, context=CONTEXT)
        except InvalidRequest as error:
            violations = error.violations
        assert violations or (found is not None and 0 < len(found.token_ids) < CONTEXT)
