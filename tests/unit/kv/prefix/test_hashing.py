"""Block hashes: equal for every kind of input and in every process, and computed only as far as needed."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from headrace_common.errors import InternalError, InvalidRequest
from headrace_kv.prefix.hashing import PrefixHasher, TokenIds, root_hash

SECRET = 0x5EC2E7
TOKENS = list(range(7, 7 + 4 * 204 + 3))


def naive(tokens: list[int], block_tokens: int, parent: int) -> list[int]:
    """The hashes as the module's docstring defines them."""
    hashes = []
    checkpoint, segment = parent, b""
    for number in range(len(tokens) // block_tokens):
        start = number * block_tokens
        block = struct.pack(f"<{block_tokens}I", *tokens[start : start + block_tokens])
        segment += block
        if number % 8 == 7:
            parent = checkpoint = xxh3_64_intdigest(segment, checkpoint)
            segment = b""
        else:
            parent = xxh3_64_intdigest(block, parent)
        hashes.append(parent)
    return hashes


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=400),
    block_tokens=st.integers(1, 40),
    secret=st.integers(0, 2**64 - 1),
    cut=st.integers(0, 20),
)
def test_every_kind_of_input_gives_the_chain_of_its_blocks(
    tokens: list[int], block_tokens: int, secret: int, cut: int
) -> None:
    hasher = PrefixHasher(root_hash(secret, "model", block_tokens), block_tokens)
    expected = naive(tokens, block_tokens, hasher.root)
    words = np.array(tokens, np.uint32)
    for given_tokens in (tokens, tuple(tokens), array("I", tokens), words, words.tobytes()):
        assert hasher.hashes(given_tokens) == expected
    cut = min(cut, len(expected)) // 8 * 8
    if cut:
        rest = tokens[cut * block_tokens :]
        assert hasher.hashes(rest, parent=expected[cut - 1]) == expected[cut:]


@given(
    positions=st.lists(st.integers(0, 203), max_size=12),
    kind=st.sampled_from([list, tuple, partial(array, "I"), partial(np.array, dtype=np.uint32)]),
)
def test_hashes_are_computed_only_as_far_as_needed(
    positions: list[int], kind: Callable[[list[int]], TokenIds]
) -> None:
    hasher = PrefixHasher(root_hash(SECRET), 4)
    expected = naive(TOKENS, 4, hasher.root)
    prompt = hasher.lazy(kind(TOKENS))
    assert len(prompt) == prompt.block_count == 204
    for position in positions:
        assert prompt[position] == expected[position]
    # A hash needs the checkpoints before it, and itself if it is one.
    assert len(prompt.checkpoints) == max(((p + 1) // 8 for p in positions), default=0)
    assert [prompt[:count] for count in positions] == [expected[:count] for count in positions]
    assert prompt[:] == expected


SALTS = st.from_regex(r"[0-9a-f]{0,64}", fullmatch=True)


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    block_tokens=st.integers(1, 16),
    salt=SALTS,
    other=SALTS,
)
def test_a_salt_changes_every_hash_from_the_first_block_on(
    tokens: list[int], block_tokens: int, salt: str, other: str
) -> None:
    hasher = PrefixHasher(root_hash(SECRET, "model", block_tokens), block_tokens)
    chain, other_chain = (hasher.hashes(tokens, hasher.root_of(one)) for one in (salt, other))
    assert chain == naive(tokens, block_tokens, hasher.root_of(salt))
    assert hasher.lazy(tuple(tokens), hasher.root_of(salt))[:] == chain
    assert (chain == hasher.hashes(tokens)) == (not salt or not chain)
    if salt == other:
        assert chain == other_chain
    else:
        assert not set(chain) & set(other_chain)


def test_secret_and_scope_keep_hashes_apart() -> None:
    roots = {
        root_hash(secret, *scope)
        for secret in (1, 2)
        for scope in ((), ("a", 16), ("a", 32), ("a1", 6), ("b", 16))
    }
    assert len(roots) == 10
    chains = [PrefixHasher(root, 4).hashes(TOKENS) for root in roots]
    assert len({block for chain in chains for block in chain}) == 10 * 204


@pytest.mark.parametrize("tokens", [[1, 2, -3, 4], [1, 2, 3, 2**32], [1, 2, "3", 4]])
def test_invalid_token_ids_are_rejected(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="token_ids"):
        PrefixHasher(1, 4).hashes(tokens)


def test_buffers_of_other_formats_are_rejected() -> None:
    others: tuple[Any, ...] = (
        np.zeros(8, np.int64),
        np.zeros(8, np.float32),
        np.zeros(16, np.uint32)[::2],
    )
    for words in others:
        with pytest.raises(InternalError, match="buffer"):
            PrefixHasher(1, 4).hashes(words)
    with pytest.raises(InternalError, match="buffer"):
        PrefixHasher(1, 4).hashes(b"12345")
    with pytest.raises(InternalError, match="0 tokens"):
        PrefixHasher(1, 0)
