"""Rejects clients' RPCs at the least cost: by API key, by bytes, then by the number of fields."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import islice

from google.protobuf.descriptor import Descriptor

from headrace.inference.v1 import inference_pb2
from headrace_common.limits import REQUEST_FIELDS_MAX
from headrace_common.rpc.handlers import GateInterceptor, Metadata
from headrace_common.rpc.wire_fields import MalformedMessage, fields_of, require_few_fields
from headrace_frontend.request.size import RequestSizeCheck
from headrace_frontend.tenants import Tenants
from headrace_router.metrics import RouterMetrics

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_REQUEST_TYPES: Mapping[str, Descriptor] = {
    f"/{_SERVICE.full_name}/{method.name}": method.input_type for method in _SERVICE.methods
}
_TEXT = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["text"].number
_GENERATE = f"/{_SERVICE.full_name}/Generate"
_LIST_MODELS = f"/{_SERVICE.full_name}/ListModels"
# Protobuf parses a message of this size in half a millisecond, whatever it contains.
_UNCOUNTED_BYTES = 64 * 1024
# A client that sends its text behind more fields than these has it checked once it is parsed.
_FIELDS_SEARCHED = 64


def _text_bytes(data: bytes, request_type: Descriptor) -> int:
    """Bytes of the longest text in a serialized request. 0 where there is none in the first fields.

    Parsing and converting a text of some MiB would take milliseconds of the event loop.
    """
    if request_type is not inference_pb2.GenerateRequest.DESCRIPTOR:
        return 0
    with suppress(MalformedMessage):
        return max(
            (
                end - start
                for number, start, end in islice(fields_of(data, 0, len(data)), _FIELDS_SEARCHED)
                if number == _TEXT and start is not None
            ),
            default=0,
        )
    return 0


class ClientGate(GateInterceptor):
    """Guards the InferenceService."""

    def __init__(self, tenants: Tenants, metrics: RouterMetrics, size: RequestSizeCheck) -> None:
        self._tenants = tenants
        self._metrics = metrics
        self._size = size

    def check_call(self, method: str, metadata: Metadata) -> None:
        if method == _GENERATE:
            with self._metrics.count_failures():
                self._tenants.tenant_of(metadata)
        elif method == _LIST_MODELS:
            self._tenants.tenant_of(metadata)

    def check_request(self, method: str, data: bytes) -> None:
        request_type = _REQUEST_TYPES.get(method)
        if request_type is None:
            return
        self._size.check(len(data))
        if len(data) > _UNCOUNTED_BYTES:
            require_few_fields(data, request_type, REQUEST_FIELDS_MAX)
            self._size.check_text(_text_bytes(data, request_type))
