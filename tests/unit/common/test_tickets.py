"""A handoff ticket is for one transfer between two incarnations with one layout, and public keys expire."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.v1 import handoff_pb2
from headrace_common import tickets
from headrace_common.errors import HeadraceError, PermissionDenied, QueueFull, Unauthenticated
from headrace_common.limits import TICKET_BYTES_MAX
from headrace_common.tickets import SigningKey, TicketKeys, check_handoff, sign_handoff
from tests.set_clock import SetClock

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


KEPT_S = 90.0


def public_key() -> bytes:
    return SigningKey().public.public_key


def test_a_key_is_known_while_it_is_in_use_and_a_bounded_time_after() -> None:
    clock, key = SetClock(), SigningKey().public
    known = TicketKeys(KEPT_S, clock)
    first, second = known.use(key.public_key), known.use(key.public_key)
    first.end()
    first.end()
    clock.now_s += 10 * KEPT_S
    assert known.find(key.key_id) is not None, "the second stream is open"
    second.end()
    clock.now_s += KEPT_S - 1
    assert known.find(key.key_id) is not None
    third = known.use(key.public_key)
    clock.now_s += 10 * KEPT_S
    assert known.find(key.key_id) is not None, "the router came back"
    third.end()
    clock.now_s += KEPT_S + 1
    assert known.find(key.key_id) is None
    assert len(known) == 0


def test_the_number_of_keys_is_bounded_and_those_in_use_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tickets, "TICKET_KEYS_MAX", 3)
    known = TicketKeys(KEPT_S, SetClock())
    open_key = SigningKey().public
    known.use(open_key.public_key)
    ended = SigningKey().public
    known.use(ended.public_key).end()
    for _ in range(5):
        known.use(public_key()).end()
    assert len(known) == 3
    assert known.find(ended.key_id) is None, "the oldest one makes room"
    assert known.find(open_key.key_id) is not None
    for _ in range(2):
        known.use(public_key())
    with pytest.raises(QueueFull):
        known.use(public_key())
    known.use(open_key.public_key)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_bytes_that_are_no_key_are_refused(size: int) -> None:
    known = TicketKeys()
    with pytest.raises(ValueError, match=f"give 32 bytes, not {size}"):
        known.use(bytes(size))
    assert len(known) == 0


async def test_a_wait_ends_when_the_key_comes_or_at_its_limit() -> None:
    known, key = TicketKeys(), SigningKey().public
    waits = [asyncio.create_task(known.wait_for(key.key_id, 60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    known.use(public_key())
    await asyncio.sleep(0)
    assert not any(wait.done() for wait in waits)
    known.use(key.public_key)
    assert [await wait for wait in waits] == [known.find(key.key_id)] * 2
    assert await known.wait_for(SigningKey().public.key_id, 0.01) is None


def test_a_private_key_is_in_no_attribute_that_is_printed() -> None:
    key = SigningKey()
    assert key._key.private_bytes_raw().hex() not in f"{key!r}{key.public!r}"
    assert SigningKey().public.key_id != key.public.key_id
