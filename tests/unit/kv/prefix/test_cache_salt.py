"""Salts of tenants: opaque, equal in every process, and checked by workers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.registry.adapters import Adapter
from headrace_kv.prefix.cache_salt import (
    CACHE_SALT_CHARACTERS_MAX,
    adapter_salt,
    is_cache_salt,
    salt_violations,
    tenant_salt,
)

KEYS = st.integers(0, 2**64 - 1)
TENANTS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)


@given(key=KEYS, other_key=KEYS, tenant=TENANTS, other=TENANTS)
def test_a_salt_depends_on_the_key_and_the_tenant(
    key: int, other_key: int, tenant: str, other: str
) -> None:
    salt = tenant_salt(key, tenant)
    assert is_cache_salt(salt)
    assert len(salt) == 32
    assert (salt == tenant_salt(key, other)) == (tenant == other)
    assert (salt == tenant_salt(other_key, tenant)) == (key == other_key)


@given(
    salt=st.sampled_from(["", "aa", "ab"]),
    name=TENANTS,
    digest=st.from_regex("[0-9a-f]{1,64}", fullmatch=True),
)
def test_a_salt_of_an_adapter_depends_on_name_digest_and_tenant(
    salt: str, name: str, digest: str
) -> None:
    adapter = Adapter(name, digest)
    mixed = adapter_salt(salt, adapter)
    assert is_cache_salt(mixed)
    assert mixed == adapter_salt(salt, Adapter(name, digest))
    others = [Adapter(name + "x", digest), Adapter(name, digest[:-1] + "g"), None]
    assert mixed not in {
        *(adapter_salt(salt, other) for other in others),
        adapter_salt("ac", adapter),
    }
    assert adapter_salt(salt, None) == salt


def test_another_process_derives_an_equal_salt() -> None:
    code = (
        "from headrace_kv.prefix.cache_salt import tenant_salt; print(tenant_salt(77, 'tenant-a'))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert answer.stdout.strip() == tenant_salt(77, "tenant-a")


@pytest.mark.parametrize("salt", ["", "0", "abcdef0123456789", "f" * CACHE_SALT_CHARACTERS_MAX])
def test_hexadecimal_salts_are_accepted(salt: str) -> None:
    assert not salt_violations(salt)


@pytest.mark.parametrize(
    "salt", ["f" * (CACHE_SALT_CHARACTERS_MAX + 1), "A", "tenant", "a b", "a\n", "\n", "\u0660"]
)
def test_other_salts_are_rejected(salt: str) -> None:
    assert set(salt_violations(salt)) == {"cache_salt"}
