"""The cache salt of each tenant."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Literal, TypeAlias

from headrace_kv.prefix.cache_salt import tenant_salt

PrefixCacheScope: TypeAlias = Literal["auto", "shared", "tenant"]


class CacheSalts:
    """Gives each tenant its own salt, or all tenants the empty one.

    `prefix_hash_key` returns the deployment's key, or 0 while it is unknown. Until then the salts are this process's
    own, so tenants are separated from the first request on.
    """

    def __init__(self, *, by_tenant: bool, prefix_hash_key: Callable[[], int]) -> None:
        self._by_tenant = by_tenant
        self._prefix_hash_key = prefix_hash_key
        self._own_key = secrets.randbits(64)

    def salt_of(self, tenant: str) -> str:
        """The salt of a tenant's requests."""
        if not self._by_tenant:
            return ""
        return tenant_salt(self._prefix_hash_key() or self._own_key, tenant)
