"""Rejects clients' RPCs at the least cost: by API key, by bytes, then by the number of fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from google.protobuf.descriptor import Descriptor

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.limits import REQUEST_FIELDS_MAX, UNKNOWN_CONTEXT_TOKENS
from headrace_common.rpc.gate import GateInterceptor, Metadata
from headrace_common.rpc.wire_fields import require_few_fields
from headrace_router.admission.tenants import Tenants
from headrace_router.metrics import RouterMetrics

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_REQUEST_TYPES: Mapping[str, Descriptor] = {
    f"/{_SERVICE.full_name}/{method.name}": method.input_type for method in _SERVICE.methods
}
# Prefill proves its right by a ticket, and ListModels needs none.
_NEED_KEY = frozenset(f"/{_SERVICE.full_name}/{name}" for name in ("Generate", "Route"))
# A token of the prompt and one of the answer so far, as numbers in a message.
_NUMBER_BYTES = 10
_OTHER_BYTES = 1024 * 1024
# Protobuf parses a message of this size in half a millisecond, whatever it contains.
_UNCOUNTED_BYTES = 64 * 1024


def needed_request_bytes(context: int, bytes_per_token: int) -> int:
    """Bytes that a request for a context of this many tokens can need."""
    return _OTHER_BYTES + context * (bytes_per_token + _NUMBER_BYTES)


class ClientGate(GateInterceptor):
    """Guards the InferenceService.

    `max_model_len` returns the context length of each served model, and `bytes_per_token` is the bound on a prompt's
    text.
    """

    def __init__(
        self,
        tenants: Tenants,
        metrics: RouterMetrics,
        max_model_len: Callable[[], Mapping[str, int]],
        bytes_per_token: int,
    ) -> None:
        self._tenants = tenants
        self._metrics = metrics
        self._max_model_len = max_model_len
        self._bytes_per_token = bytes_per_token

    def check_call(self, method: str, metadata: Metadata) -> None:
        if method in _NEED_KEY:
            with self._metrics.count_failures():
                self._tenants.tenant_of(metadata)

    def check_request(self, method: str, data: bytes) -> None:
        request_type = _REQUEST_TYPES.get(method)
        if request_type is None:
            return
        self.check_bytes(len(data))
        if len(data) > _UNCOUNTED_BYTES:
            require_few_fields(data, request_type, REQUEST_FIELDS_MAX)

    def check_bytes(self, request_bytes: int) -> None:
        """Raises InvalidRequest for more bytes than a prompt for the longest context needs."""
        if request_bytes <= _OTHER_BYTES:
            return
        lengths = self._max_model_len().values()
        context = max((length or UNKNOWN_CONTEXT_TOKENS for length in lengths), default=0)
        bytes_max = needed_request_bytes(context, self._bytes_per_token)
        if request_bytes > bytes_max:
            raise InvalidRequest(
                {
                    "request": f"has {request_bytes} bytes, and a prompt for the context of {context} tokens "
                    f"needs at most {bytes_max}; shorten it"
                }
            )
