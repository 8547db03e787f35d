"""Cache salts: only requests with an equal salt share blocks of a prefix cache. The empty salt is one of them. Pure."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from headrace_common.registry.adapters import Adapter

CACHE_SALT_CHARACTERS_MAX: Final = 64
_SALT_BYTES: Final = 16
_SALT: Final = re.compile(f"[0-9a-f]{{0,{CACHE_SALT_CHARACTERS_MAX}}}")
# BLAKE2's personalization: no salt equals another digest under the same key.
_PERSON: Final = b"cachsalt"
_ADAPTER_PERSON: Final = b"adapsalt"
_CLIENT_PERSON: Final = b"clntsalt"


def tenant_salt(prefix_hash_key: int, tenant: str) -> str:
    """The salt of a tenant, equal in all routers of a deployment. Without the key it does not reveal the tenant."""
    digest = hashlib.blake2s(
        tenant.encode(),
        digest_size=_SALT_BYTES,
        key=prefix_hash_key.to_bytes(8, "little"),
        person=_PERSON,
    )
    return digest.hexdigest()


def adapter_salt(cache_salt: str, adapter: Adapter | None) -> str:
    """The salt of requests with an adapter, from their tenant's. Without an adapter it is the tenant's."""
    if adapter is None:
        return cache_salt
    return _joined(_ADAPTER_PERSON, cache_salt, adapter.name, adapter.digest)


def client_salt(cache_salt: str, text: str) -> str:
    """The salt of requests for which a client gives a salt, from their tenant's. Without one it is the tenant's."""
    return _joined(_CLIENT_PERSON, cache_salt, text) if text else cache_salt


def _joined(person: bytes, *parts: str) -> str:
    named = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2s(named.encode(), digest_size=_SALT_BYTES, person=person).hexdigest()


def is_cache_salt(text: str) -> bool:
    """Whether workers accept the text as a salt."""
    return _SALT.fullmatch(text) is not None


def salt_violations(cache_salt: str) -> dict[str, str]:
    """The remedy for a salt that is none, by its field."""
    if is_cache_salt(cache_salt):
        return {}
    return {
        "cache_salt": f"must be 0 to {CACHE_SALT_CHARACTERS_MAX} characters of 0-9 and a-f, as the router sets it"
    }
