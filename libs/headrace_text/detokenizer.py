"""Tokens to text while they come, never part of a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 16
# A character has at most four bytes. More tokens without a whole one are no character at all, and
# waiting on would
# hold the answer back for good.
_HELD_TOKENS_MAX = 8


class TextStream:
    """Text of one answer, token by token.

    Decodes a short window that reaches back into the prompt, because tokenizers write a token
    differently at the
    start of a text than inside one. `decode` is a TextCodec's.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int]
    ) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-_WINDOW_TOKENS:])
        self._sent = decode(self._window)
        self._held_tokens = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._window.append(token_id)
        self._held_tokens += 1
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and self._held_tokens < _HELD_TOKENS_MAX:
            return ""
        fresh = self._beyond_sent(text)
        self._sent = text
        if len(self._window) > 2 * _WINDOW_TOKENS:
            # Only what was sent just now surely starts at a whole character.
            self._window = self._window[-self._held_tokens :]
            self._sent = self._decode(self._window)
        self._held_tokens = 0
        return fresh

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete, as of pushing one after the other, for about the price of one."""
        if len(token_ids) > 1:
            window = [*self._window, *token_ids]
            text = self._decode(window)
            # Otherwise it has to be known where the unfinished character began.
            if not text.endswith(_REPLACEMENT):
                fresh = self._beyond_sent(text)
                held = self._held_tokens + len(token_ids)
                self._window, self._sent, self._held_tokens = window, text, 0
                if len(window) > 2 * _WINDOW_TOKENS:
                    # Only what was sent just now surely starts at a whole character.
                    self._window = window[-held:]
                    self._sent = self._decode(self._window)
                return fresh
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """What is left and whole at the end of the answer. An unfinished character is dropped."""
        fresh = self._beyond_sent(self._decode(self._window)).rstrip(_REPLACEMENT)
        self._sent += fresh
        return fresh

    def _beyond_sent(self, text: str) -> str:
        """What `text` adds. What was an unfinished character before may be a whole one now."""
        sent = self._sent
        while sent.endswith(_REPLACEMENT) and not text.startswith(sent):
            sent = sent[:-1]
        return text[len(sent) :]
