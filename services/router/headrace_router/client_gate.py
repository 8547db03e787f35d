"""Rejects clients' RPCs at the least cost: by API key, by bytes, then by the number of fields."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.descriptor import Descriptor

from headrace.inference.v1 import inference_pb2
from headrace_common.limits import REQUEST_FIELDS_MAX
from headrace_common.rpc.gate import GateInterceptor, Metadata
from headrace_common.rpc.wire_fields import require_few_fields
from headrace_frontend.request.size import RequestSizeCheck
from headrace_frontend.tenants import Tenants
from headrace_router.metrics import RouterMetrics

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_REQUEST_TYPES: Mapping[str, Descriptor] = {
    f"/{_SERVICE.full_name}/{method.name}": method.input_type for method in _SERVICE.methods
}
# Prefill proves its right by a ticket, and ListModels needs none.
_NEED_KEY = frozenset(f"/{_SERVICE.full_name}/{name}" for name in ("Generate", "Route"))
# Protobuf parses a message of this size in half a millisecond, whatever it contains.
_UNCOUNTED_BYTES = 64 * 1024


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
