"""API keys: the tenant that each of them stands for."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

from headrace_common.access.key_file import key_digest, key_in, load_keys
from headrace_common.errors import Unauthenticated
from headrace_common.reloading import ReloadedFiles
from headrace_kv.prefix.cache_salt import tenant_salt

DEFAULT_TENANT: Final = "default"
_NO_KEYS: Final[Mapping[str, str]] = {}
_REMEDY = "send yours as metadata 'authorization: Bearer KEY' or 'x-api-key: KEY'"


class Tenants:
    """Tenants by key. Without a keys file, all callers are one tenant.

    Keys are stored and compared as SHA-256 digests: neither a memory dump nor response times reveal them. No message
    contains a key.
    """

    def __init__(self, keys: ReloadedFiles[Mapping[str, str]] | None) -> None:
        """`keys` has the tenant of each digest."""
        self._keys = keys

    @property
    def by_digest(self) -> Mapping[str, str]:
        """The tenant of each key's digest. The same object until the keys change."""
        return self._keys.current() if self._keys is not None else _NO_KEYS

    @property
    def keyed(self) -> bool:
        """Whether requests need a key."""
        return self._keys is not None

    def tenant_of(self, metadata: Iterable[tuple[str, Any]] | None) -> str:
        """The tenant of the API key in an RPC's metadata. Raises Unauthenticated, with the remedy."""
        if self._keys is None:
            return DEFAULT_TENANT
        key = key_in(metadata or ())
        if not key:
            raise Unauthenticated(f"an API key is required; {_REMEDY}")
        tenant = self._keys.current().get(key_digest(key))
        if tenant is None:
            raise Unauthenticated(
                f"the API key is not known here; check it, or ask the operator for one, and {_REMEDY}"
            )
        return tenant


def tenant_or_none(tenants: Tenants, metadata: Iterable[tuple[str, Any]]) -> str:
    """The tenant of a known API key in an RPC's metadata. Empty without one."""
    if not tenants.keyed:
        return ""
    try:
        return tenants.tenant_of(metadata)
    except Unauthenticated:
        return ""


def load_tenants(path: str, setting: str = "api_keys_file") -> Tenants:
    """The tenants of the keys file that a setting names. It is read again when it changes. An empty path means no file.

    A .toml file has entries `"KEY" = "TENANT"`, any other file has lines `KEY TENANT`. In these # begins a comment. KEY
    may be `sha256:HEX`, the digest of a key. Raises ConfigError, which names file and line but never a key.
    """
    return Tenants(load_keys(path, setting) if path else None)


PrefixCacheScope: TypeAlias = Literal["auto", "shared", "tenant"]


_known_salt: Final = lru_cache(maxsize=4_096)(tenant_salt)


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
        return _known_salt(self._prefix_hash_key() or self._own_key, tenant)
