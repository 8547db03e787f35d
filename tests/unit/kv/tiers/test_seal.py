"""Seals of stored blocks."""

from __future__ import annotations

import pytest

from headrace_kv.tiers.pool import pool_secret
from headrace_kv.tiers.pool_process import SEAL_BYTES, is_sealed, seal_of

SECRET = pool_secret(5)
CONTENT = memoryview(bytes(range(200)))


def test_a_block_has_the_seal_that_it_was_stored_with() -> None:
    seal = seal_of(SECRET, "a", CONTENT)
    assert len(seal) == SEAL_BYTES
    assert is_sealed(SECRET, "a", CONTENT, seal)


@pytest.mark.parametrize("position", [0, 100, 199])
def test_a_changed_byte_breaks_the_seal(position: int) -> None:
    changed = bytearray(CONTENT)
    changed[position] ^= 1
    assert not is_sealed(SECRET, "a", memoryview(changed), seal_of(SECRET, "a", CONTENT))


def test_a_seal_holds_for_its_name_length_and_deployment_only() -> None:
    seal = seal_of(SECRET, "a", CONTENT)
    assert not is_sealed(SECRET, "b", CONTENT, seal)
    assert not is_sealed(SECRET, "a", CONTENT[:-1], seal)
    assert not is_sealed(pool_secret(6), "a", CONTENT, seal)


@pytest.mark.parametrize("position", [0, 8, 16, SEAL_BYTES - 1])
def test_a_changed_seal_is_none(position: int) -> None:
    seal = bytearray(seal_of(SECRET, "a", CONTENT))
    seal[position] ^= 1
    assert not is_sealed(SECRET, "a", CONTENT, bytes(seal))


def test_a_seal_cannot_be_made_without_the_key() -> None:
    # Everything but the tag is as it should be.
    seal = seal_of(SECRET, "a", CONTENT)
    forged = seal[:32] + seal_of(pool_secret(6), "a", CONTENT)[32:]
    assert not is_sealed(SECRET, "a", CONTENT, forged)
