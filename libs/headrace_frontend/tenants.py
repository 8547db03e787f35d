"""API keys: the tenant that each of them stands for."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from headrace_common.errors import ConfigError, Unauthenticated
from headrace_common.identity import is_worker_id
from headrace_common.reloading import ReloadedFiles

DEFAULT_TENANT: Final = "default"
KEYS_MAX: Final = 10_000
_KEY_BYTES_MAX = 512
_NO_KEYS: Final[Mapping[str, str]] = {}
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")
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
        key = _key_in(metadata or ())
        if not key:
            raise Unauthenticated(f"an API key is required; {_REMEDY}")
        tenant = self._keys.current().get(_digest(key)) if len(key) <= _KEY_BYTES_MAX else None
        if tenant is None:
            raise Unauthenticated(
                f"the API key is not known here; check it, or ask the operator for one, and {_REMEDY}"
            )
        return tenant


class TenantAliases:
    """Names of tenants for tickets, which workers and clients read.

    An alias is a hash that is keyed by the tenant's own keys. So only routers with the same keys file know the tenant.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._made_of: Mapping[str, str] = {}
        self._alias_of: dict[str, str] = {}
        self._tenant_of: dict[str, str] = {}

    def alias_of(self, tenant: str) -> str:
        """The alias of a tenant. Empty without API keys."""
        self._refresh()
        return self._alias_of.get(tenant, "")

    def tenant_of(self, alias: str) -> str:
        """The tenant of an alias. One that is not known here, as of another keys file, is a tenant by itself."""
        self._refresh()
        return self._tenant_of.get(alias, alias) or DEFAULT_TENANT

    def _refresh(self) -> None:
        by_digest = self._tenants.by_digest
        if by_digest is self._made_of:
            return
        digests: dict[str, list[str]] = {}
        for digest, tenant in by_digest.items():
            digests.setdefault(tenant, []).append(digest)
        self._alias_of = {
            tenant: hmac.new("".join(sorted(owned)).encode(), tenant.encode(), "sha256").hexdigest()
            for tenant, owned in digests.items()
        }
        self._tenant_of = {alias: tenant for tenant, alias in self._alias_of.items()}
        self._made_of = by_digest


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
    return Tenants(ReloadedFiles([path], lambda: _read_keys(path, setting)) if path else None)


def _read_keys(path: str, setting: str) -> Mapping[str, str]:
    """The tenant of each key's digest."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{setting} {path} cannot be read: {type(error).__name__}; name a readable text file"
        ) from error
    pairs = (
        _toml_pairs(f"{setting} {path}", text)
        if path.endswith(".toml")
        else _line_pairs(f"{setting} {path}", text)
    )
    if not pairs:
        raise ConfigError(f"{setting} {path} names no key; add one, or leave the setting empty")
    if len(pairs) > KEYS_MAX:
        raise ConfigError(f"{setting} {path} holds more than {KEYS_MAX} keys")
    by_digest: dict[str, str] = {}
    for where, key, tenant in pairs:
        if not is_worker_id(tenant):
            raise ConfigError(
                f"{setting} {path}, {where}: name the tenant with 1 to 63 characters of "
                "a-z, 0-9, '.', '_' and '-'"
            )
        hashed = _HASHED.fullmatch(key)
        if by_digest.setdefault(hashed[1] if hashed else _digest(key.encode()), tenant) != tenant:
            raise ConfigError(f"{setting} {path}, {where}: the key belongs to two tenants")
    return by_digest


def _line_pairs(file: str, text: str) -> list[tuple[str, str, str]]:
    pairs: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise ConfigError(f"{file}, line {number}: write it as KEY TENANT")
        pairs.append((f"line {number}", words[0], words[1]))
    return pairs


def _toml_pairs(file: str, text: str) -> list[tuple[str, str, str]]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        # The parser's message may quote a key.
        raise ConfigError(f'{file} is not TOML; write lines such as "KEY" = "TENANT"') from None
    for number, value in enumerate(table.values(), 1):
        if not isinstance(value, str):
            raise ConfigError(f'{file}, entry {number}: write it as "KEY" = "TENANT"')
    return [
        (f"entry {number}", key, tenant) for number, (key, tenant) in enumerate(table.items(), 1)
    ]


def _key_in(metadata: Iterable[tuple[str, Any]]) -> bytes:
    for name, value in metadata:
        raw = value if isinstance(value, bytes) else str(value).encode()
        if name == "x-api-key":
            return raw.strip()
        if name == "authorization":
            scheme, _, key = raw.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
    return b""


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
