"""Converts tokens to text while they are generated, in whole characters, and finds stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headrace_text.codec import TextCodec
from headrace_text.parsing.buffered import longest_beginning


class StopStringScanner:
    """Returns text up to the first stop string. Holds back text that may be the beginning of one.

    The first stop string is the one that is complete first. The result therefore does not depend on the pieces in
    which the text arrives.
    """

    def __init__(self, stop_strings: Sequence[str], *, keeps_stop: bool = False) -> None:
        """`stop_strings` must not contain an empty string. `keeps_stop`: the text includes the stop string."""
        self._stop_strings = tuple(stop_strings)
        self._keeps_stop = keeps_stop
        self._held = ""
        self._ignored = 0
        """First characters of `_held` in which no stop string ends the text."""
        self.stopped_by = ""
        """The stop string that is complete. Empty while none is."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return bool(self.stopped_by)

    def scan(self, text: str, *, may_stop: bool = True) -> str:
        """The text, including text held back before, that cannot be part of a stop string any more.

        Without `may_stop`, a stop string that ends in `text` does not count.
        """
        if not self._stop_strings:
            return text
        pending = self._held + text
        if not may_stop:
            self._ignored = len(pending)
        match = self._first_match(pending)
        if match is not None:
            end, start = match
            self.stopped_by = pending[start:end]
            self._held = ""
            return pending[: end if self._keeps_stop else start]
        keep = longest_beginning(pending, self._stop_strings)
        self._held = pending[len(pending) - keep :]
        self._ignored = max(0, self._ignored - (len(pending) - keep))
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """The text held back, at the end of the completion."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """End and start of the match that ends first, and of those the one that starts first."""
        found = [
            (start + len(stop), start)
            for stop in self._stop_strings
            if (start := text.find(stop, max(0, self._ignored - len(stop) + 1))) >= 0
        ]
        return min(found, default=None)


_REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 16
# A character has at most four bytes. More tokens without a whole character are invalid bytes: holding them back would
# hold the completion back for ever.
_HELD_TOKENS_MAX = 8


class IncrementalDetokenizer:
    """Text of one completion, token by token.

    The codec's own step is the cheap way. It waits for a whole character, however many tokens that takes, and knows no
    incomplete character of the prompt. In these cases, the rest of the completion is decoded in a short window.
    """

    _window: _Window
    """Set while there is no step."""

    def __init__(
        self,
        codec: TextCodec,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        context = prompt_token_ids[-_WINDOW_TOKENS:]
        self._decode = partial(codec.decode, skip_special_tokens=skip_special_tokens)
        self._new_step = partial(codec.decode_step, skip_special_tokens=skip_special_tokens)
        self._start(context)
        self._recent: list[int] = list(context)
        """The tokens of the window with which the step would be continued."""
        self._held_tokens = 0

    def _start(self, context: Sequence[int]) -> None:
        self._step = self._new_step(context)
        if self._step is None:
            self._window = _Window(self._decode, context)

    def append(self, token_id: int) -> str:
        """The text that this token completes. Empty while a character is incomplete."""
        if self._step is None:
            return self._window.append(token_id)
        self._recent.append(token_id)
        self._held_tokens += 1
        try:
            text = self._step(token_id)
        except Exception:  # noqa: BLE001 - the library raises Exception itself
            return self._leave_step()
        if text is not None:
            if len(self._recent) > 2 * _WINDOW_TOKENS:
                # Only the tokens of `text` are sure to start at a whole character.
                self._recent = self._recent[-self._held_tokens :]
            self._held_tokens = 0
            return text
        return "" if self._held_tokens < _HELD_TOKENS_MAX else self._leave_step()

    def extend(self, token_ids: list[int]) -> str:
        """The text that these tokens complete: as `append` for each of them."""
        if self._step is None:
            return self._window.extend(token_ids)
        if len(token_ids) > 1 and not self._held_tokens:
            try:
                text = self._step(token_ids)
            except Exception:  # noqa: BLE001 - the library raises Exception itself
                text = None
            if text is not None:
                whole = len(self._recent) + len(token_ids) > 2 * _WINDOW_TOKENS
                self._recent = list(token_ids) if whole else [*self._recent, *token_ids]
                return text
            # It has taken the tokens. Another one begins before them, and `append` finds the last whole character.
            self._start(self._recent)
        return "".join(map(self.append, token_ids))

    def flush(self) -> str:
        """The remaining whole characters, at the end of the completion. Drops an incomplete character."""
        if self._step is not None:
            if not self._held_tokens:
                return ""
            held = self._enter_window()
            return self._window.extend(held) + self._window.flush()
        return self._window.flush()

    def _leave_step(self) -> str:
        """Decodes the held tokens, and all that follow, in a window."""
        held = self._enter_window()
        return "".join(map(self._window.append, held))

    def _enter_window(self) -> list[int]:
        """Lets the window follow the text that was returned. Returns the tokens that are held back."""
        held = self._recent[-self._held_tokens :]
        self._window = _Window(self._decode, self._recent[: -self._held_tokens])
        self._step = None
        self._recent = []
        return held


class _Window:
    """Decodes a short window that includes the end of the text before.

    Tokenizers decode a token differently at the start of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(token_ids)
        self._returned = decode(self._tokens)
        """Text of the window that was returned already."""
        self._held_tokens = 0

    def append(self, token_id: int) -> str:
        self._tokens.append(token_id)
        self._held_tokens += 1
        text = self._decode(self._tokens)
        if text.endswith(_REPLACEMENT) and self._held_tokens < _HELD_TOKENS_MAX:
            return ""
        return self._return_up_to(text)

    def extend(self, token_ids: Sequence[int]) -> str:
        """As `append` for each token, but it decodes only once."""
        if len(token_ids) > 1:
            tokens = [*self._tokens, *token_ids]
            text = self._decode(tokens)
            # At an incomplete character, `append` finds the token at which it begins.
            if not text.endswith(_REPLACEMENT):
                self._tokens = tokens
                self._held_tokens += len(token_ids)
                return self._return_up_to(text)
        return "".join(map(self.append, token_ids))

    def flush(self) -> str:
        fresh = self._beyond_returned(self._decode(self._tokens)).rstrip(_REPLACEMENT)
        self._returned += fresh
        return fresh

    def _return_up_to(self, text: str) -> str:
        """The part of the window's `text` that is new. Shortens a long window."""
        fresh = self._beyond_returned(text)
        self._returned = text
        if len(self._tokens) > 2 * _WINDOW_TOKENS:
            # Only the tokens of `fresh` are sure to start at a whole character.
            self._tokens = self._tokens[-self._held_tokens :]
            self._returned = self._decode(self._tokens)
        self._held_tokens = 0
        return fresh

    def _beyond_returned(self, text: str) -> str:
        """What `text` adds. A character that was incomplete before may be whole now."""
        returned = self._returned
        while returned.endswith(_REPLACEMENT) and not text.startswith(returned):
            returned = returned[:-1]
        return text[len(returned) :]
