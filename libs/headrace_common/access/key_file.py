"""Files of keys: which name each key stands for.

Keys are stored and compared as SHA-256 digests. No message contains a key.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from headrace_common.errors import ConfigError
from headrace_common.identity import is_worker_id
from headrace_common.reloading import ReloadedFiles, read_text

KEYS_MAX: Final = 10_000
_KEY_BYTES_MAX: Final = 512
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


def load_keys(path: str, setting: str) -> ReloadedFiles[Mapping[str, str]]:
    """The name of each key's digest, from the file that a setting names. It is read again when it changes.

    A .toml file has entries `"KEY" = "NAME"`, any other file has lines `KEY NAME`. In these # begins a comment. KEY may
    be `sha256:HEX`, the digest of a key. Raises ConfigError, which names file and line but never a key.
    """
    return ReloadedFiles([path], lambda: _read_keys(path, setting))


def key_in(metadata: Iterable[tuple[str, Any]]) -> bytes:
    """The key in the metadata of an RPC or the headers of a request. Empty without one."""
    for name, value in metadata:
        raw = value if isinstance(value, bytes) else str(value).encode()
        if name == "x-api-key":
            return raw.strip()
        if name == "authorization":
            scheme, _, key = raw.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
    return b""


def key_digest(key: bytes) -> str:
    """The SHA-256 digest of a key. Empty for one that is longer than any key."""
    return "" if len(key) > _KEY_BYTES_MAX else hashlib.sha256(key).hexdigest()


def _read_keys(path: str, setting: str) -> Mapping[str, str]:
    """The tenant of each key's digest."""
    text = read_text(setting, path)
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
        digest = hashed[1] if hashed else hashlib.sha256(key.encode()).hexdigest()
        if by_digest.setdefault(digest, tenant) != tenant:
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
    return [(f"entry {n}", key, tenant) for n, (key, tenant) in enumerate(table.items(), 1)]
