"""A model whose KV cache and output have a closed form.

The KV bytes of a position are a function of the tokens up to it, the layer and the head. The next
token is a function of all KV bytes of the context: a weighted sum with odd weights, so that one
wrong byte always changes the sum. An engine computes that sum from memory;
`SimModel.expected_tokens` computes it from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace_engine.interface import Sampling
from headrace_engine.sim.mix import WORD_MASK, U64Array, counted_words, mix_int, mix_words
from headrace_engine.sim.sampling import choose_token

GREEDY = Sampling(temperature=0.0)

_TOKEN_SEED = 11
_SALT_SEED = 12
_WEIGHT_SEED = 13
_POSITION_SEED = 14
_CLOSED_FORM_POSITIONS = 1024


class SimModel:
    """Shapes: [layers, heads, words] with `word_count` 8-byte words for one head and token."""

    def __init__(self, layers: int, heads: int, head_bytes: int, vocabulary: int) -> None:
        self.layers = layers
        self.heads = heads
        self.head_bytes = head_bytes
        self.vocabulary = vocabulary
        self.word_count = head_bytes // 8
        shape = (layers, heads, self.word_count)
        size = layers * heads * self.word_count
        self.salts = counted_words(size, _SALT_SEED).reshape(shape)
        self.weights = (counted_words(size, _WEIGHT_SEED) | np.uint64(1)).reshape(shape)
        self._position_weights = np.empty(0, np.uint64)

    def prefix_sums(self, token_ids: Sequence[int], start: int = 0, base: int = 0) -> U64Array:
        """Running sums over tokens from position `start`, given the sum `base` before it. Shape
        [tokens].
        """
        tokens = np.asarray(token_ids, np.uint64)
        positions = counted_words(len(token_ids), _TOKEN_SEED, start)
        terms = mix_words(positions ^ mix_words(tokens + np.uint64(1)))
        return np.cumsum(terms, dtype=np.uint64) + np.array([base], np.uint64)

    def prefix_hashes(self, token_ids: Sequence[int]) -> U64Array:
        """A hash for each position, of all tokens up to and with it. Shape [tokens]."""
        return mix_words(self.prefix_sums(token_ids))

    def kv_words(
        self, hashes: U64Array, layers: slice = slice(None), heads: slice = slice(None)
    ) -> U64Array:
        """KV of the positions with these prefix hashes. Shape [positions, layers, heads, words]."""
        return mix_words(hashes[:, None, None, None] ^ self.salts[layers, heads])

    def position_weights(self, count: int) -> U64Array:
        """Odd weights of positions 0 to `count`; the array is shared and must not be written. Shape
        [count].
        """
        if len(self._position_weights) < count:
            size = max(count, 2 * len(self._position_weights))
            self._position_weights = counted_words(size, _POSITION_SEED) | np.uint64(1)
        return self._position_weights[:count]

    def expected_digest(self, hashes: U64Array, start: int = 0) -> int:
        """What positions from `start` with these hashes add to the digest of an intact cache."""
        weights = self.position_weights(start + len(hashes))[start:]
        total = 0
        for first in range(0, len(hashes), _CLOSED_FORM_POSITIONS):
            part = slice(first, first + _CLOSED_FORM_POSITIONS)
            words = self.kv_words(hashes[part])
            words *= self.weights
            total += int((words.sum(axis=(1, 2, 3), dtype=np.uint64) * weights[part]).sum())
        return total & WORD_MASK

    def expected_tokens(
        self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY
    ) -> tuple[int, ...]:
        """The answer of `count` tokens, or less when a stop token, which is included, comes first.

        `sampling` must be greedy or have a seed; its max_tokens is not looked at.
        """
        sums = self.prefix_sums(prompt)
        digest = self.expected_digest(mix_words(sums))
        running = int(sums[-1])
        answer: list[int] = []
        while len(answer) < count:
            choice = choose_token(digest, self.vocabulary, sampling, prompt, answer)
            answer.append(choice.token_id)
            if choice.token_id in sampling.stop_token_ids:
                break
            position = len(prompt) + len(answer) - 1
            sums = self.prefix_sums(answer[-1:], position, running)
            running = int(sums[-1])
            digest = (digest + self.expected_digest(mix_words(sums), position)) & WORD_MASK
        return tuple(answer)

    def name(self) -> str:
        """Identity of the weights: equal names give equal KV bytes and answers."""
        return f"sim-{mix_int(self.vocabulary):016x}"
