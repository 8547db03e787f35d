"""Converts tokens to text while they are generated, in whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 16
# A character has at most four bytes. More tokens without a whole character are invalid bytes: holding them back would
# hold the completion back for ever.
_HELD_TOKENS_MAX = 8


class IncrementalDetokenizer:
    """Text of one completion, token by token.

    Decodes a short window that includes the end of the prompt. Tokenizers decode a token differently at the start of
    a text. `decode` is a TextCodec's.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int]
    ) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-_WINDOW_TOKENS:])
        self._returned = decode(self._window)
        """Text of the window that was returned already."""
        self._held_tokens = 0

    def append(self, token_id: int) -> str:
        """The text that this token completes. Empty while a character is incomplete."""
        self._window.append(token_id)
        self._held_tokens += 1
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and self._held_tokens < _HELD_TOKENS_MAX:
            return ""
        return self._return_up_to(text)

    def extend(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete: as `append` for each of them, but it decodes only once."""
        if len(token_ids) > 1:
            window = [*self._window, *token_ids]
            text = self._decode(window)
            # At an incomplete character, `append` finds the token at which it begins.
            if not text.endswith(_REPLACEMENT):
                self._window = window
                self._held_tokens += len(token_ids)
                return self._return_up_to(text)
        return "".join(map(self.append, token_ids))

    def flush(self) -> str:
        """The remaining whole characters, at the end of the completion. Drops an incomplete character."""
        fresh = self._beyond_returned(self._decode(self._window)).rstrip(_REPLACEMENT)
        self._returned += fresh
        return fresh

    def _return_up_to(self, text: str) -> str:
        """The part of the window's `text` that is new. Shortens a long window."""
        fresh = self._beyond_returned(text)
        self._returned = text
        if len(self._window) > 2 * _WINDOW_TOKENS:
            # Only the tokens of `fresh` are sure to start at a whole character.
            self._window = self._window[-self._held_tokens :]
            self._returned = self._decode(self._window)
        self._held_tokens = 0
        return fresh

    def _beyond_returned(self, text: str) -> str:
        """What `text` adds. A character that was incomplete before may be whole now."""
        returned = self._returned
        while returned.endswith(_REPLACEMENT) and not text.startswith(returned):
            returned = returned[:-1]
        return text[len(returned) :]
