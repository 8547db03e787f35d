"""A handoff ticket is for one transfer between two incarnations with one layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import HeadraceError, PermissionDenied, Unauthenticated
from headrace_common.limits import TICKET_BYTES_MAX
from headrace_common.tickets import SigningKey, TicketKeys, check_handoff, sign_handoff

KEY, OTHER = SigningKey(), SigningKey()
KEYS = TicketKeys()
KEYS.use(KEY.public.public_key)
CLAIMS = handoff_pb2.HandoffClaims(
    transfer_id="x1",
    prefill_worker_id="prefill-0",
    prefill_incarnation="a" * 16,
    decode_worker_id="decode-0",
    decode_incarnation="d" * 16,
    layout_hash=bytes(range(32)),
)
TICKET = sign_handoff(KEY, CLAIMS)


def refusal(
    ticket: bytes, required: handoff_pb2.HandoffClaims = CLAIMS
) -> tuple[type[HeadraceError], str]:
    with pytest.raises((PermissionDenied, Unauthenticated)) as raised:
        check_handoff(KEYS.find, ticket, required)
    part = raised.value.metadata["ticket"]
    return type(raised.value), part


def test_a_ticket_with_the_required_claims_is_valid() -> None:
    check_handoff(KEYS.find, TICKET, CLAIMS)
    assert len(TICKET) <= TICKET_BYTES_MAX


@pytest.mark.parametrize("name", [field.name for field in CLAIMS.DESCRIPTOR.fields])
def test_a_ticket_for_something_else_is_refused_by_the_name_of_the_claim(name: str) -> None:
    required = handoff_pb2.HandoffClaims()
    required.CopyFrom(CLAIMS)
    setattr(required, name, b"other" if name == "layout_hash" else "other")
    error, part = refusal(TICKET, required)
    assert (error, part) == (PermissionDenied, name)
    # Without the key, the claim cannot be changed.
    changed = handoff_pb2.HandoffTicket.FromString(TICKET)
    changed.claims = required.SerializeToString()
    assert refusal(changed.SerializeToString(), required) == (Unauthenticated, "signature")


def test_a_ticket_of_another_key_is_refused() -> None:
    assert refusal(b"") == (Unauthenticated, "missing")
    forged = sign_handoff(OTHER, CLAIMS)
    assert refusal(forged) == (Unauthenticated, "key_id")
    named = handoff_pb2.HandoffTicket.FromString(forged)
    named.key_id = KEY.public.key_id
    assert refusal(named.SerializeToString()) == (Unauthenticated, "signature")


def test_a_ticket_of_another_kind_is_no_handoff_ticket() -> None:
    """The same claims under the same key mean another permission."""
    content = CLAIMS.SerializeToString()
    other = handoff_pb2.HandoffTicket(
        claims=content,
        signature=KEY.sign("headrace.kv.v1.Other", content),
        key_id=KEY.public.key_id,
    )
    assert refusal(other.SerializeToString()) == (Unauthenticated, "signature")


@given(st.integers(min_value=0), st.integers(1, 255), st.binary(max_size=2 * TICKET_BYTES_MAX))
def test_a_changed_byte_and_random_bytes_are_refused(index: int, mask: int, noise: bytes) -> None:
    changed = bytearray(TICKET)
    changed[index % len(changed)] ^= mask
    for content in (bytes(changed), noise, TICKET[: index % len(TICKET)]):
        refusal(content)


@given(st.binary(max_size=300), st.binary(max_size=80), st.binary(max_size=40))
def test_random_parts_are_refused(claims: bytes, signature: bytes, key_id: bytes) -> None:
    for part in (key_id, KEY.public.key_id):
        ticket = handoff_pb2.HandoffTicket(claims=claims, signature=signature, key_id=part)
        refusal(ticket.SerializeToString())


def test_a_long_ticket_is_not_parsed() -> None:
    assert refusal(TICKET + bytes(TICKET_BYTES_MAX))[1] == "signature"
