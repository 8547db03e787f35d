"""A ticket is valid for one request on one worker, for a limited time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import Unauthenticated
from headrace_common.tickets.direct import TicketSigner, check_ticket
from headrace_common.tickets.keys import SigningKey, TicketKeys

KEY, OTHER = SigningKey(), SigningKey()
KEYS = TicketKeys()
KEYS.use(KEY.public.public_key)


def signed(key: SigningKey = KEY, ttl_s: float = 10.0) -> decode_pb2.GenerateRequest:
    request = decode_pb2.GenerateRequest(
        request_id="r",
        transfer_id="x1",
        incarnation="ab" * 8,
        token_ids=[1, 2, 3],
        sampling=sampling_pb2.SamplingParams(temperature=0.5, max_tokens=8),
        stop_token_ids=[7],
        remote_prefill=True,
    )
    request.ticket = TicketSigner(key, ttl_s).sign(request, "decode-0", "team-a")
    return request


def refusal(request: decode_pb2.GenerateRequest, worker_id: str = "decode-0") -> str:
    with pytest.raises(Unauthenticated) as raised:
        check_ticket(KEYS.find, request, worker_id)
    return raised.value.metadata["ticket"]


def test_a_ticket_is_valid_for_its_request_after_serialization() -> None:
    again = decode_pb2.GenerateRequest.FromString(signed().SerializeToString())
    claims = check_ticket(KEYS.find, again, "decode-0")
    assert (claims.tenant, claims.worker_id) == ("team-a", "decode-0")
    assert again.ticket, "the check does not change the request"


def test_an_expired_ticket_is_valid_only_within_late_s() -> None:
    request = signed(ttl_s=-1)
    assert refusal(request) == "expiry"
    assert check_ticket(KEYS.find, request, "decode-0", late_s=5).tenant == "team-a"


@pytest.mark.parametrize("offset_s", [-3600, -11, 11, 3600])
def test_a_ticket_expires_by_the_clock_of_its_worker(offset_s: int) -> None:
    def worker_clock(worker_id: str, incarnation: str) -> int:
        assert (worker_id, incarnation) == ("decode-0", "ab" * 8)
        return time.time_ns() + offset_s * 10**9

    request = signed()
    request.ticket = TicketSigner(KEY, 10.0, worker_clock).sign(request, "decode-0", "team")
    claims = check_ticket(KEYS.find, request, "decode-0", clock=worker_clock)
    assert 0 < claims.expire_unix_ns - worker_clock("decode-0", "ab" * 8) <= 10 * 10**9

    def later(worker_id: str, incarnation: str) -> int:
        return worker_clock(worker_id, incarnation) + 11 * 10**9

    with pytest.raises(Unauthenticated) as raised:
        check_ticket(KEYS.find, request, "decode-0", clock=later)
    stamp_s = int(raised.value.metadata["unix_ns"]) / 1e9
    assert stamp_s == pytest.approx(time.time() + offset_s + 11, abs=5)


def test_a_ticket_is_valid_for_one_worker_and_for_routers() -> None:
    assert refusal(signed(), "decode-1") == "worker_id"
    assert check_ticket(KEYS.find, signed(), None).worker_id == "decode-0"


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
        lambda request: setattr(request, "priority", 1),
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
            check_ticket(KEYS.find, request, "decode-0")


def test_another_router_is_unknown_and_cannot_name_the_key_of_a_known_one() -> None:
    assert refusal(signed(OTHER)) == "key_id"
    request = signed(OTHER)
    ticket = decode_pb2.Ticket.FromString(request.ticket)
    ticket.key_id = KEY.public.key_id
    request.ticket = ticket.SerializeToString()
    assert refusal(request) == "signature"


def test_a_handoff_ticket_is_no_direct_ticket() -> None:
    """The same bytes as claims, signed by the same key, mean another permission."""
    request = signed()
    ticket = decode_pb2.Ticket.FromString(request.ticket)
    ticket.signature = KEY.sign(handoff_pb2.HandoffClaims.DESCRIPTOR.full_name, ticket.claims)
    request.ticket = ticket.SerializeToString()
    assert refusal(request) == "signature"
