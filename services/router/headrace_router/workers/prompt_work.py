"""The prompts that this router has given to one worker, and how much of them is left to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Prompt tokens of one worker that are not known to be computed.

    An engine computes prompts in the order of their arrival: `head_tokens` are those of the first one, which has had
    its turn since `head_start_s` by the router's monotonic clock.
    """

    tokens: int = 0
    head_tokens: int = 0
    head_start_s: float = 0.0


NO_WORK: Final = PromptWork()


class PromptQueue:
    """Owns the prompts of one worker, in the order in which they came. One event loop owns it."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._total = 0
        self._head_start_s = 0.0
        self._next = 0

    def add(self, tokens: int, now_s: float) -> int:
        """The worker gets a prompt. Returns its number."""
        if not self._tokens:
            self._head_start_s = now_s
        self._next += 1
        self._tokens[self._next] = tokens
        self._total += tokens
        return self._next

    def remove(self, number: int, now_s: float) -> None:
        """A prompt is computed, or was given up. Repeats are ignored."""
        tokens = self._tokens.get(number)
        if tokens is None:
            return
        if number == next(iter(self._tokens)):
            self._head_start_s = now_s
        del self._tokens[number]
        self._total -= tokens

    @property
    def work(self) -> PromptWork:
        """What is left."""
        head = next(iter(self._tokens.values()), 0)
        return PromptWork(self._total, head, self._head_start_s)
