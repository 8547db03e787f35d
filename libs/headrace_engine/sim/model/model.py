"""A model with a closed form for its KV cache and output.

The KV bytes of a position are a function of the tokens up to it, the cache, part, layer and head. A
state is the same function of the last position. The next token is a function of the digest: a sum
over all bytes of the context. Its weights are odd, so one wrong byte always changes it. An engine
computes the digest from memory; `SimModel.expected_tokens` computes it from the tokens alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as counted
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_common.registry.adapters import Adapter
from headrace_engine.interface import Sampling, TokenLogprobs
from headrace_engine.sim.model.bit_mixer import (
    WORD_MASK,
    U64Array,
    counted_words,
    mix_int,
    mix_words,
)
from headrace_engine.sim.model.sampling import choose_token, token_logprobs
from headrace_engine.sim.model.settings import SimSettings, word_of
from headrace_kv.layout import STATE, CacheGroup, Part

GREEDY = Sampling(temperature=0.0)

WordArray = NDArray[np.unsignedinteger[Any]]

_TOKEN_SEED = 11
_SALT_SEED = 12
_WEIGHT_SEED = 13
_POSITION_SEED = 14
_FURTHER_SEEDS = 100
_CLOSED_FORM_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class PartFormula:
    """The bytes of one part of a cache. Shapes of `salts` and `weights`: [layers, heads, words]."""

    word: np.dtype[np.unsignedinteger[Any]]
    salts: U64Array
    weights: U64Array

    @classmethod
    def of(cls, cache: CacheGroup, part: Part, number: int) -> PartFormula:
        """The formula of a cache's part, the `number`th of the model."""
        word = word_of(part)
        shape = (len(cache.layers), cache.head_count, part.unit_bytes // word.itemsize)
        size = int(np.prod(shape))
        further = number * _FURTHER_SEEDS
        salts = counted_words(size, _SALT_SEED + further)
        weights = counted_words(size, _WEIGHT_SEED + further) | np.uint64(1)
        return cls(word, salts.reshape(shape), weights.reshape(shape))

    def part(self, layers: slice, heads: slice = slice(None)) -> PartFormula:
        """The formula of some layers and heads."""
        return PartFormula(self.word, self.salts[layers, heads], self.weights[layers, heads])

    def words(self, hashes: U64Array) -> WordArray:
        """Words of the positions with these prefix hashes. Shape [positions, layers, heads, words]."""
        mixed = mix_words(hashes[:, None, None, None] ^ self.salts)
        return mixed.astype(self.word, copy=False)

    def digests(self, hashes: U64Array) -> U64Array:
        """Each position's sum for the digest, without the position's weight. Shape [positions]."""
        words: U64Array = self.words(hashes).astype(np.uint64, copy=False)
        words *= self.weights
        digests: U64Array = words.sum(axis=(1, 2, 3), dtype=np.uint64)
        return digests


class SimModel:
    """`formulas[i]` are the formulas of the parts of `caches[i]`."""

    def __init__(self, settings: SimSettings) -> None:
        self.caches = settings.caches
        self.layer_count = settings.layer_count
        self.vocabulary = settings.vocabulary
        self._verifies = settings.verify
        numbers = counted()
        self.formulas = tuple(
            tuple(PartFormula.of(cache, part, next(numbers)) for part in cache.parts)
            for cache in self.caches
        )
        self._position_weights = np.empty(0, np.uint64)
        self._position_words = np.empty(0, np.uint64)

    @staticmethod
    def adapter_sum(adapter: Adapter | None) -> int:
        """The sum before the first token of a prompt: another one for each adapter."""
        return 0 if adapter is None else mix_int(zlib.crc32(adapter.digest.encode()) + 1)

    def prefix_sums(self, token_ids: Sequence[int], start: int = 0, base: int = 0) -> U64Array:
        """Running sums over tokens from position `start`, after the sum `base`. Shape [tokens]."""
        tokens = np.asarray(token_ids, np.uint64)
        positions = self._token_words(start + len(token_ids))[start:]
        terms = mix_words(positions ^ mix_words(tokens + np.uint64(1)))
        return np.cumsum(terms, dtype=np.uint64) + np.array([base], np.uint64)

    def _token_words(self, count: int) -> U64Array:
        """The words of positions 0 to `count`, in a shared array: do not write. Shape [count]."""
        if len(self._position_words) < count:
            size = max(count, 2 * len(self._position_words))
            self._position_words = counted_words(size, _TOKEN_SEED)
        return self._position_words[:count]

    def next_sum(self, token_id: int, position: int, base: int) -> int:
        """`prefix_sums` of one token."""
        if position >= len(self._position_words):
            self._token_words(position + 1)
        word = int(self._position_words[position])
        return (base + mix_int(word ^ mix_int(token_id + 1))) & WORD_MASK

    def position_weights(self, count: int) -> U64Array:
        """Odd weights of positions 0 to `count`, in a shared array: do not write. Shape [count]."""
        if len(self._position_weights) < count:
            size = max(count, 2 * len(self._position_weights))
            self._position_weights = counted_words(size, _POSITION_SEED) | np.uint64(1)
        return self._position_weights[:count]

    def expected_digest(self, hashes: U64Array) -> int:
        """The digest of an intact context, from the hashes of its positions."""
        tokens, states = self._sums(hashes)
        return (int(tokens.sum()) + int(states[-1])) & WORD_MASK

    def _sums(self, hashes: U64Array, start: int = 0) -> tuple[U64Array, U64Array]:
        """The terms of positions from `start`, and those of the states after each of them. Shapes [positions].

        The digest after a position is the sum of all terms up to it, and of its states.
        """
        tokens, states = np.zeros_like(hashes), np.zeros_like(hashes)
        if not self._verifies:
            return tokens, hashes
        weights = self.position_weights(start + len(hashes))[start:]
        for first in range(0, len(hashes), _CLOSED_FORM_POSITIONS):
            part = slice(first, first + _CLOSED_FORM_POSITIONS)
            for cache, formulas in zip(self.caches, self.formulas, strict=True):
                for formula in formulas:
                    if cache.kind == STATE:
                        states[part] += formula.digests(hashes[part])
                    else:
                        tokens[part] += formula.digests(hashes[part]) * weights[part]
        return tokens, states

    def prompt_logprobs(
        self, prompt: Sequence[int], hashes: U64Array, count: int
    ) -> tuple[TokenLogprobs, ...]:
        """Of each token of a prompt after the first, with `count` alternatives. `hashes` are those of its positions."""
        tokens, states = self._sums(hashes[: len(prompt) - 1])
        digests = (np.cumsum(tokens, dtype=np.uint64) + states).tolist()
        return tuple(
            token_logprobs(digest, self.vocabulary, token_id, count)
            for digest, token_id in zip(digests, prompt[1:], strict=True)
        )

    def expected_tokens(
        self,
        prompt: Sequence[int],
        count: int,
        sampling: Sampling = GREEDY,
        adapter: Adapter | None = None,
    ) -> tuple[int, ...]:
        """The answer of `count` tokens, or up to and including a stop token.

        `sampling` must be greedy or have a seed. Its max_tokens is ignored.
        """
        sums = self.prefix_sums(prompt, base=self.adapter_sum(adapter))
        digest, position = 0, 0
        answer: list[int] = []
        while len(answer) < count:
            tokens, states = self._sums(mix_words(sums), position)
            digest += int(tokens.sum())
            whole = (digest + int(states[-1])) & WORD_MASK
            answer.append(choose_token(whole, self.vocabulary, sampling, prompt, answer).token_id)
            if answer[-1] in sampling.stop_token_ids:
                break
            position = len(prompt) + len(answer) - 1
            sums = self.prefix_sums(answer[-1:], position, int(sums[-1]))
        return tuple(answer)

    def name(self) -> str:
        """Identifies the weights: equal names and layouts give equal KV bytes and answers."""
        suffix = "" if self._verifies else "-unverified"
        return f"sim-{mix_int(self.vocabulary):016x}{suffix}"
