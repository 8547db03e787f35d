"""Whose prefixes may be compared: what workers and routers must agree on before they hash a prompt."""

from __future__ import annotations

import hashlib
from typing import Final

from headrace_kv.prefix.hashing import PrefixHasher, root_hash

# What keeps the fingerprint from being of use for anything else.
_PERSON: Final = b"prefixes"


def prefix_hasher(prefix_hash_key: int, model: str, block_tokens: int) -> PrefixHasher:
    """The hasher of all workers that serve `model`, by the name in the registry, in blocks of `block_tokens`.

    `prefix_hash_key` is the deployment's, as RegisterResponse brings it.
    """
    return PrefixHasher(root_hash(prefix_hash_key, model, block_tokens), block_tokens)


def key_fingerprint(prefix_hash_key: int) -> int:
    """32 bits that tell deployments' keys apart and give none away; 0 for no key."""
    if not prefix_hash_key:
        return 0
    digest = hashlib.blake2s(prefix_hash_key.to_bytes(8, "little"), digest_size=4, person=_PERSON)
    return int.from_bytes(digest.digest(), "little") or 1
