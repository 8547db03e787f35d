"""Bounds the requests of clients before they are parsed, since their ticket is part of the request."""

from __future__ import annotations

from headrace.decode.v1 import decode_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.limits import REQUEST_FIELDS_MAX
from headrace_common.rpc.gate import GateInterceptor, Metadata
from headrace_common.rpc.wire_fields import require_few_fields

_GENERATE = "/headrace.decode.v1.DecodeService/Generate"
_TYPE = decode_pb2.GenerateRequest.DESCRIPTOR
# A token in a message.
_NUMBER_BYTES = 5
_OTHER_BYTES = 1024 * 1024
# A handoff stream's messages. None depends on the prompt's length by more than its numbers.
_MESSAGE_BYTES = 8 * 1024 * 1024


def message_bytes_max(max_model_len: int) -> int:
    """The bound on every message that a decode worker receives, also after decompression."""
    return _MESSAGE_BYTES + max_model_len * _NUMBER_BYTES


class DecodeGate(GateInterceptor):
    """Guards Generate by bytes, then by the number of fields. `max_model_len` is the engine's context length."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    def check_call(self, method: str, metadata: Metadata) -> None:
        pass

    def check_request(self, method: str, data: bytes) -> None:
        if method != _GENERATE:
            return
        bytes_max = _OTHER_BYTES + self._max_model_len * _NUMBER_BYTES
        if len(data) > bytes_max:
            raise InvalidRequest(
                {
                    "request": f"has {len(data)} bytes, and one for the context of {self._max_model_len} tokens needs "
                    f"at most {bytes_max}; shorten it"
                }
            )
        require_few_fields(data, _TYPE, REQUEST_FIELDS_MAX)
