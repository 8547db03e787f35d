"""A ticket is valid for one request on one worker, for a limited time."""

from __future__ import annotations

import hmac
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_common.errors import Unauthenticated
from headrace_common.rpc.tickets import TicketSigner, check_ticket

KEY = bytes(range(32))


def signed(key: bytes = KEY, ttl_s: float = 10.0) -> decode_pb2.GenerateRequest:
    request = decode_pb2.GenerateRequest(
        request_id="r",
        transfer_id="x1",
        incarnation="ab" * 8,
        token_ids=[1, 2, 3],
        sampling=sampling_pb2.SamplingParams(temperature=0.5, max_tokens=8),
        stop_token_ids=[7],
        remote_prefill=True,
    )
    request.ticket = TicketSigner(lambda: key, ttl_s).sign(request, "decode-0", "team-a")
    return request


def refusal(request: decode_pb2.GenerateRequest, worker_id: str = "decode-0") -> str:
    with pytest.raises(Unauthenticated) as raised:
        check_ticket(KEY, request, worker_id)
    return raised.value.metadata["ticket"]


def test_a_ticket_is_valid_for_its_request_after_serialization() -> None:
    again = decode_pb2.GenerateRequest.FromString(signed().SerializeToString())
    claims = check_ticket(KEY, again, "decode-0")
    assert (claims.tenant, claims.worker_id) == ("team-a", "decode-0")
    assert again.ticket, "the check does not change the request"


def test_an_expired_ticket_is_valid_only_within_late_s() -> None:
    request = signed(ttl_s=-1)
    assert refusal(request) == "expiry"
    assert check_ticket(KEY, request, "decode-0", late_s=5).tenant == "team-a"


def test_a_ticket_is_valid_for_one_worker_and_for_routers() -> None:
    assert refusal(signed(), "decode-1") == "worker_id"
    assert check_ticket(KEY, signed(), None).worker_id == "decode-0"


@pytest.mark.parametrize(
    "change",
    [
        lambda request: request.token_ids.append(4),
        lambda request: request.token_ids.__setitem__(0, 9),
        lambda request: setattr(request.sampling, "max_tokens", 9),
        lambda request: setattr(request.sampling, "seed", 0),
        lambda request: request.stop_token_ids.pop(),
        lambda request: setattr(request, "remote_prefill", False),
        lambda request: setattr(request, "request_id", "s"),
    ],
)
def test_a_changed_request_is_rejected(
    change: Callable[[decode_pb2.GenerateRequest], None],
) -> None:
    request = signed()
    change(request)
    assert refusal(request) == "request_hash"


@pytest.mark.parametrize("field", ["transfer_id", "incarnation"])
def test_another_attempt_is_rejected(field: str) -> None:
    request = signed()
    setattr(request, field, "cd" * 8)
    assert refusal(request) == "transfer_id"


def test_claims_cannot_be_changed() -> None:
    request = signed(ttl_s=-1)
    ticket = decode_pb2.Ticket.FromString(request.ticket)
    claims = decode_pb2.TicketClaims.FromString(ticket.claims)
    claims.expire_unix_ns += 10**12
    ticket.claims = claims.SerializeToString()
    request.ticket = ticket.SerializeToString()
    assert refusal(request) == "signature"


@given(st.integers(min_value=0), st.integers(1, 255), st.binary(max_size=200))
def test_a_changed_byte_and_random_bytes_are_rejected(index: int, mask: int, noise: bytes) -> None:
    changed = bytearray(signed().ticket)
    changed[index % len(changed)] ^= mask
    for content in (bytes(changed), noise):
        request = signed()
        request.ticket = content
        with pytest.raises(Unauthenticated):
            check_ticket(KEY, request, "decode-0")


def test_another_key_and_no_key_are_rejected() -> None:
    assert refusal(signed(bytes(32))) == "signature"
    assert signed(b"").ticket == b"", "without a key there is no ticket"
    forged = signed()
    ticket = decode_pb2.Ticket.FromString(forged.ticket)
    ticket.signature = hmac.digest(b"", ticket.claims, "sha256")
    forged.ticket = ticket.SerializeToString()
    with pytest.raises(Unauthenticated):
        check_ticket(b"", forged, "decode-0")
