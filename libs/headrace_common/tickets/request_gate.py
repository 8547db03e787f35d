"""Bounds the requests of clients before they are parsed, since their ticket is part of the request."""

from __future__ import annotations

from collections.abc import Callable

from headrace.decode.v1 import decode_pb2
from headrace_common.errors import InvalidRequest, Unauthenticated
from headrace_common.limits import REQUEST_FIELDS_MAX
from headrace_common.rpc.gate import GateInterceptor, Metadata
from headrace_common.rpc.wire_fields import MalformedMessage, fields_of, require_few_fields
from headrace_common.tickets.direct import require_signed_ticket
from headrace_common.tickets.keys import FindKey

_GENERATE = "/headrace.decode.v1.DecodeService/Generate"
_TYPE = decode_pb2.GenerateRequest.DESCRIPTOR
_TICKET = _TYPE.fields_by_name["ticket"].number
# A token in a message.
_NUMBER_BYTES = 5
_OTHER_BYTES = 1024 * 1024
# A handoff stream's messages. None depends on the prompt's length by more than its numbers.
_MESSAGE_BYTES = 8 * 1024 * 1024


def message_bytes_max(max_model_len: int) -> int:
    """The bound on every message that a decode worker receives, also after decompression."""
    return _MESSAGE_BYTES + max_model_len * _NUMBER_BYTES


class ClientDecodeGate(GateInterceptor):
    """Guards Generate of clients by bytes, by the number of fields, then by the signature of the ticket.

    So protobuf parses no more of a stranger's request than its ticket. `max_model_len` is as in DecodeGate.
    """

    def __init__(
        self, max_model_len: int, find_key: FindKey, on_refused: Callable[[str], None]
    ) -> None:
        """`on_refused` gets the wrong part of a refused ticket."""
        self._sizes = DecodeGate(max_model_len)
        self._find_key = find_key
        self._on_refused = on_refused

    def check_call(self, method: str, metadata: Metadata) -> None:
        pass

    def check_request(self, method: str, data: bytes) -> None:
        self._sizes.check_request(method, data)
        if method != _GENERATE:
            return
        try:
            require_signed_ticket(self._find_key, _ticket_in(data))
        except Unauthenticated as error:
            self._on_refused(error.metadata["ticket"])
            raise


def _ticket_in(data: bytes) -> bytes:
    """The ticket of a serialized GenerateRequest. Of several, protobuf takes the last. Empty without one."""
    ticket = b""
    try:
        for number, start, end in fields_of(data, 0, len(data)):
            if number == _TICKET and start is not None:
                ticket = data[start:end]
    except MalformedMessage:
        raise InvalidRequest(
            {"request": f"cannot be parsed; send the message type of {_GENERATE}"}
        ) from None
    return ticket


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
