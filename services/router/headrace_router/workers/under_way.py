"""Prompts that workers are to compute: a later prompt with the same beginning finds their KV there. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from headrace_kv.layout import WorkerRef
from headrace_router.workers.table import LoadTable, Numbers

# Prompts with fewer tokens in common are not worth a comparison.
_START_TOKENS: Final = 64
# Of prompts with the same start, so many are compared with a new one: those that were placed last.
_COMPARED_MAX: Final = 16


@dataclass(slots=True, eq=False)
class PromptUnderWay:
    """A prompt, in the words that prefixes are hashed from, on the worker that is to compute it.

    It must not be changed.
    """

    ref: WorkerRef
    token_ids: array[int]
    cache_salt: str
    start: tuple[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start = _start_of(self.token_ids, self.cache_salt)


class PromptsUnderWay:
    """Those of all workers. One event loop owns it."""

    def __init__(self) -> None:
        self._by_start: dict[tuple[str, bytes], dict[PromptUnderWay, None]] = {}

    def add(self, prompt: PromptUnderWay) -> None:
        """A worker is to compute a prompt. Call `remove` once it has, or will not."""
        self._by_start.setdefault(prompt.start, {})[prompt] = None

    def remove(self, prompt: PromptUnderWay) -> bool:
        """The worker announces its blocks by itself, or has none. False for a repeat."""
        prompts = self._by_start.get(prompt.start, {})
        if prompt not in prompts:
            return False
        del prompts[prompt]
        if not prompts:
            del self._by_start[prompt.start]
        return True

    def credited(
        self, cached_tokens: Numbers, table: LoadTable, token_ids: array[int], cache_salt: str
    ) -> Numbers:
        """`cached_tokens` of each worker, raised to the whole blocks that it is to compute. Shape [worker]."""
        prompts = self._by_start.get(_start_of(token_ids, cache_salt))
        if prompts is None:
            return cached_tokens
        words, tokens_max = token_ids.tobytes(), len(token_ids)
        common: dict[WorkerRef, int] = {}
        for prompt in islice(reversed(prompts), _COMPARED_MAX):
            known = common.get(prompt.ref, 0)
            # Most prompts that run at the same time are equal, so that the first comparison finds all.
            if known < tokens_max:
                size = _common_size(prompt.token_ids.tobytes(), words)
                common[prompt.ref] = max(known, size // token_ids.itemsize)
        for ref, tokens in common.items():
            cached_tokens = table.with_cached_prompt(cached_tokens, ref, tokens)
        return cached_tokens


def _start_of(token_ids: array[int], cache_salt: str) -> tuple[str, bytes]:
    return cache_salt, token_ids[:_START_TOKENS].tobytes()


def _common_size(one: bytes, other: bytes) -> int:
    """Of what both begin with, in bytes."""
    end = min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    # The first difference is in [start, end).
    start = 0
    while end - start > 1:
        middle = (start + end) // 2
        if one[start:middle] == other[start:middle]:
            start = middle
        else:
            end = middle
    return start
