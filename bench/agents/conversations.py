"""Conversations with a long history over OpenAI HTTP: their texts, and their turns."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

# Random words have some 3.4 tokens.
_TOKENS_PER_WORD: Final = 3.4
_MESSAGE_WORDS: Final = 750
_QUESTION_WORDS: Final = 150
_CHAT_WORDS: Final = 115
_ROUTER_PARTS: Final = ("admission", "tokenize", "route")

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `router_ms`: the part of the first token in which our router admits, tokenizes and places it."""

    first_ms: float
    router_ms: float
    prompt_tokens: int
    cached_tokens: int
    reusable_tokens: int
    """Of the prompt and the answer of the turn before."""


class Words:
    """Texts of words that are not in the tokenizer's vocabulary."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = [
            "".join(self._random.choices("aeiourstlnmdpc", k=self._random.randint(3, 9)))
            for _ in range(4_000)
        ]

    def text(self, count: int) -> str:
        """So many words."""
        return " ".join(self._random.choices(self._words, k=count))

    def history(self, tokens: int) -> Messages:
        """A conversation of about so many tokens, up to the first question. Empty for none."""
        left = round(tokens / _TOKENS_PER_WORD)
        messages: Messages = []
        while left > 0:
            role = ("user", "assistant")[len(messages) % 2]
            messages.append({"role": role, "content": self.text(min(left, _MESSAGE_WORDS))})
            left -= _MESSAGE_WORDS
        return messages


@dataclass(slots=True)
class Conversation:
    """A conversation with one server. Without a history, each turn is a chat of its own."""

    words: Words
    messages: Messages
    turns: list[Turn] = field(default_factory=list)
    _reusable_tokens: int = 0

    async def ask(self, client: httpx.AsyncClient, wanted: dict[str, Any]) -> None:
        """Sends a question with the whole conversation, and reads the answer to its end."""
        count = _QUESTION_WORDS if self.messages else _CHAT_WORDS
        messages = [*self.messages, {"role": "user", "content": self.words.text(count)}]
        content = json.dumps({"model": "sim", "stream": True, "messages": messages, **wanted})
        begin_s = time.perf_counter()
        first_s, text = 0.0, ""
        latency: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        cached_share = 0.0
        async with client.stream("POST", "/v1/chat/completions", content=content) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                for event in _events(line):
                    usage = event.get("usage") or usage
                    timing = (event.get("nvext") or {}).get("timing") or {}
                    cached_share = timing.get("kv_hit_rate") or cached_share
                    for choice in event["choices"]:
                        latency = choice.get("latency") or latency
                        # The mock worker answers as a server of completions.
                        piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                        if piece:
                            first_s = first_s or time.perf_counter() - begin_s
                        text += piece
        if not text:
            raise RuntimeError("the answer has no text")
        parts = latency["first_token"]["parts_us"] if latency else {}
        prompt_tokens = usage.get("prompt_tokens", 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self.turns.append(
            Turn(
                first_ms=1e3 * first_s,
                router_ms=1e-3 * sum(parts.get(name, 0) for name in _ROUTER_PARTS),
                prompt_tokens=prompt_tokens,
                cached_tokens=cached or round(cached_share * prompt_tokens),
                reusable_tokens=self._reusable_tokens,
            )
        )
        if self.messages:
            self.messages = [*messages, {"role": "assistant", "content": text}]
            self._reusable_tokens = prompt_tokens + usage.get("completion_tokens", 0)


def _events(line: str) -> Iterator[dict[str, Any]]:
    if line.startswith("data: {"):
        yield json.loads(line.removeprefix("data: "))
