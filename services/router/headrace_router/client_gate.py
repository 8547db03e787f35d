"""Rejects clients' RPCs at the least cost: by API key, by bytes, then by the number of fields."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import islice

from google.protobuf.descriptor import Descriptor

from headrace.inference.v1 import inference_pb2
from headrace_common.limits import REQUEST_FIELDS_MAX
from headrace_common.rpc.gate import GateInterceptor, Metadata
from headrace_common.rpc.wire_fields import MalformedMessage, fields_of, require_few_fields
from headrace_frontend.request.size import RequestSizeCheck
from headrace_frontend.tenants import Tenants
from headrace_router.metrics import RouterMetrics

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_REQUEST_TYPES: Mapping[str, Descriptor] = {
    f"/{_SERVICE.full_name}/{method.name}": method.input_type for method in _SERVICE.methods
}
_TEXT = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["text"].number
_ROUTE_REQUEST = inference_pb2.RouteRequest.DESCRIPTOR.fields_by_name["request"].number
# Prefill proves its right by a ticket, and ListModels needs none.
_NEED_KEY = frozenset(f"/{_SERVICE.full_name}/{name}" for name in ("Generate", "Route"))
# Protobuf parses a message of this size in half a millisecond, whatever it contains.
_UNCOUNTED_BYTES = 64 * 1024
# A client that sends its text behind more fields than these has it checked once it is parsed.
_FIELDS_SEARCHED = 64


def _text_bytes(data: bytes, request_type: Descriptor) -> int:
    """Bytes of the longest text in a serialized request. 0 where there is none in the first fields.

    Parsing and converting a text of some MiB would take milliseconds of the event loop.
    """
    start, end = 0, len(data)
    with suppress(MalformedMessage):
        match request_type.name:
            case "GenerateRequest":
                pass
            case "RouteRequest":
                start, end = _longest(data, start, end, _ROUTE_REQUEST)
            case _:
                return 0
        start, end = _longest(data, start, end, _TEXT)
        return end - start
    return 0


def _longest(data: bytes, start: int, end: int, number: int) -> tuple[int, int]:
    """The start and end of the longest field with this number."""
    spans = [
        (content, field_end)
        for found, content, field_end in islice(fields_of(data, start, end), _FIELDS_SEARCHED)
        if found == number and content is not None
    ]
    return max(spans, key=lambda span: span[1] - span[0], default=(0, 0))


class ClientGate(GateInterceptor):
    """Guards the InferenceService."""

    def __init__(self, tenants: Tenants, metrics: RouterMetrics, size: RequestSizeCheck) -> None:
        self._tenants = tenants
        self._metrics = metrics
        self._size = size

    def check_call(self, method: str, metadata: Metadata) -> None:
        if method in _NEED_KEY:
            with self._metrics.count_failures():
                self._tenants.tenant_of(metadata)

    def check_request(self, method: str, data: bytes) -> None:
        request_type = _REQUEST_TYPES.get(method)
        if request_type is None:
            return
        self._size.check(len(data))
        if len(data) > _UNCOUNTED_BYTES:
            require_few_fields(data, request_type, REQUEST_FIELDS_MAX)
            self._size.check_text(_text_bytes(data, request_type))
