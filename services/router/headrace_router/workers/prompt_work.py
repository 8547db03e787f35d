"""The prompts that this router has given to one worker, and how much of them is left to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Prompt tokens of one worker that are not known to be computed.

    `attended` sums over them the tokens before each. An engine computes prompts in the order of their arrival: the head
    is the first one, which has had its turn since `head_start_s` by the router's monotonic clock.
    """

    tokens: int = 0
    attended: float = 0.0
    head_tokens: int = 0
    head_attended: float = 0.0
    head_start_s: float = 0.0


NO_WORK: Final = PromptWork()


class PromptQueue:
    """Owns the prompts of one worker, in the order in which they came. One event loop owns it."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, float]] = {}
        self._tokens = 0
        self._attended = 0.0
        self._head_start_s = 0.0
        self._next = 0

    def add(self, tokens: int, now_s: float, cached_tokens: int = 0) -> int:
        """The worker gets a prompt of `tokens` after those that it has in its cache. Returns the prompt's number."""
        if not self._prompts:
            self._head_start_s = now_s
        self._next += 1
        attended = tokens * (cached_tokens + tokens / 2)
        self._prompts[self._next] = (tokens, attended)
        self._tokens += tokens
        self._attended += attended
        return self._next

    def remove(self, number: int, now_s: float) -> None:
        """A prompt is computed, or was given up. Repeats are ignored."""
        found = self._prompts.get(number)
        if found is None:
            return
        if number == next(iter(self._prompts)):
            self._head_start_s = now_s
        del self._prompts[number]
        self._tokens -= found[0]
        self._attended -= found[1]

    @property
    def work(self) -> PromptWork:
        """What is left."""
        head_tokens, head_attended = next(iter(self._prompts.values()), (0, 0.0))
        return PromptWork(
            self._tokens, self._attended, head_tokens, head_attended, self._head_start_s
        )
