"""A stranger's request to a decode worker is rejected before protobuf parses it."""

from __future__ import annotations

import pytest

from headrace.decode.v1 import decode_pb2
from headrace_common.errors import InvalidRequest, Unauthenticated
from headrace_common.tickets.direct import TicketSigner
from headrace_common.tickets.keys import SigningKey, TicketKeys
from headrace_common.tickets.request_gate import ClientDecodeGate

_GENERATE = "/headrace.decode.v1.DecodeService/Generate"
# A text that is no UTF-8: protobuf rejects every message with it.
_BROKEN = b"\x0a\x03\xff\xff\xff"


def request(key: SigningKey) -> decode_pb2.GenerateRequest:
    made = decode_pb2.GenerateRequest(transfer_id="t", incarnation="1", token_ids=[1, 2])
    made.ticket = TicketSigner(key, 10.0).sign(made, "decode-0", "")
    return made


def test_only_a_request_with_a_router_s_ticket_is_parsed() -> None:
    key, keys, refused = SigningKey(), TicketKeys(), list[str]()
    keys.use(key.public.public_key)
    gate = ClientDecodeGate(1_000, keys.find, refused.append)
    gate.check_request(_GENERATE, request(key).SerializeToString())
    bare = decode_pb2.GenerateRequest(transfer_id="t", token_ids=[1] * 900)
    other = request(SigningKey())
    no_ticket = decode_pb2.GenerateRequest(ticket=b"no ticket")
    for asked in (bare, other, no_ticket):
        data = asked.SerializeToString() + _BROKEN
        with pytest.raises(Unauthenticated):
            gate.check_request(_GENERATE, data)
    assert refused == ["missing", "key_id", "signature"]
    gate.check_request("/grpc.health.v1.Health/Check", b"")


def test_a_request_that_ends_within_a_field_is_invalid() -> None:
    gate = ClientDecodeGate(1_000, TicketKeys().find, list[str]().append)
    with pytest.raises(InvalidRequest, match="cannot be parsed"):
        gate.check_request(_GENERATE, b"\x0a\x7f")
