"""The messages of the Endpoint Picker Protocol 1.0.0. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from headrace.gateway.v1 import external_processing_pb2 as ext_pb2
from headrace_common.errors import HeadraceError
from headrace_frontend.openai.errors import HttpError, error_bytes, headers_of, status_of

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
_DESTINATION_SPACE: Final = "envoy.lb"
_SUBSET_SPACE: Final = "envoy.lb.subset_hint"
_OVERWRITE: Final = 2
# Envoy's buffers are small, and a gRPC message of a body part needs some bytes more.
_PART_BYTES: Final = 60_000


def headers_to_dict(headers: ext_pb2.HeaderMap) -> dict[str, str]:
    """By lower-case name. The last of several values counts."""
    return {
        header.key.lower(): header.raw_value.decode("latin-1") or header.value
        for header in headers.headers
    }


def subset_of(metadata: ext_pb2.Metadata) -> frozenset[str] | None:
    """The endpoints that the gateway permits. None: all."""
    hint = metadata.filter_metadata.get(_SUBSET_SPACE)
    if hint is None or SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        texts: Iterable[str] = (item.string_value for item in value.list_value.values)
    else:
        texts = value.string_value.split(",")
    return frozenset(filter(None, map(str.strip, texts)))


def destination_headers(endpoint: str) -> ext_pb2.HeaderMutation:
    """Sets the destination, and overwrites what a client has set."""
    return _headers({DESTINATION: endpoint})


def with_destination(
    response: ext_pb2.ProcessingResponse, endpoint: str
) -> ext_pb2.ProcessingResponse:
    """Adds the destination as dynamic metadata."""
    space = response.dynamic_metadata.get_or_create_struct(_DESTINATION_SPACE)
    space[DESTINATION] = endpoint
    return response


def streamed_parts(body: bytes, *, ends: bool) -> Iterator[ext_pb2.ProcessingResponse]:
    """The unchanged body for the mode full duplex. `ends`: whether no trailers follow."""
    starts = range(0, max(1, len(body)), _PART_BYTES)
    for start in starts:
        part = ext_pb2.StreamedBodyResponse(
            body=body[start : start + _PART_BYTES],
            end_of_stream=ends and start == starts[-1],
        )
        change = ext_pb2.CommonResponse(body_mutation=ext_pb2.BodyMutation(streamed_response=part))
        yield ext_pb2.ProcessingResponse(request_body=ext_pb2.BodyResponse(response=change))


def error_response(error: HeadraceError | HttpError) -> ext_pb2.ProcessingResponse:
    """The response to the client, in OpenAI's form."""
    reason = error.code if isinstance(error, HttpError) else error.reason
    return ext_pb2.ProcessingResponse(
        immediate_response=ext_pb2.ImmediateResponse(
            status=ext_pb2.HttpStatus(code=status_of(error)),
            headers=_headers({"content-type": "application/json", **headers_of(error)}),
            body=error_bytes(error),
            details=reason.lower(),
        )
    )


def _headers(values: Mapping[str, str]) -> ext_pb2.HeaderMutation:
    return ext_pb2.HeaderMutation(
        set_headers=[
            ext_pb2.HeaderValueOption(
                header=ext_pb2.HeaderValue(key=name, raw_value=value.encode("latin-1")),
                append_action=_OVERWRITE,
            )
            for name, value in values.items()
        ]
    )
