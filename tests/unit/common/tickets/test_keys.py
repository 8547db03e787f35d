"""The public keys that a process keeps, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from headrace_common import tickets
from headrace_common.errors import QueueFull
from headrace_common.tickets import SigningKey, TicketKeys

KEPT_S = 90.0


class Clock:
    """A clock that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def public_key() -> bytes:
    return SigningKey().public.public_key


def test_a_key_is_known_while_it_is_in_use_and_a_bounded_time_after() -> None:
    clock, key = Clock(), SigningKey().public
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
    known = TicketKeys(KEPT_S, Clock())
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
