"""Whose prefixes may be compared: what workers and routers must agree on before they hash a prompt."""

from __future__ import annotations

from headrace_kv.prefix_hash import PrefixHasher, root_hash


def prefix_hasher(prefix_hash_key: int, model: str, block_tokens: int) -> PrefixHasher:
    """The hasher of all workers that serve `model`, by the name in the registry, in blocks of `block_tokens`.

    `prefix_hash_key` is the deployment's, as RegisterResponse brings it.
    """
    return PrefixHasher(root_hash(prefix_hash_key, model, block_tokens), block_tokens)
