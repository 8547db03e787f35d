"""Salts of tenants: opaque, equal in every process, and checked by workers."""

from __future__ import annotations

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


def test_routers_of_every_version_derive_an_equal_salt() -> None:
    assert tenant_salt(77, "tenant-a") == "a694f4c42382080a270cf2aef8520ed1"


def test_only_hexadecimal_salts_are_accepted() -> None:
    longest = "f" * CACHE_SALT_CHARACTERS_MAX
    for salt in ("", "0", "abcdef0123456789", longest):
        assert not salt_violations(salt)
    for salt in (longest + "f", "A", "tenant", "a b", "a\n", "\n", "\u0660"):
        assert set(salt_violations(salt)) == {"cache_salt"}
