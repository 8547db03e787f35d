"""The text of a completion: converts its tokens and finds stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_frontend.request.validation import PreparedRequest
from headrace_text.detokenizer import IncrementalDetokenizer, StopStringScanner


class CompletionText:
    """Converts the tokens of one completion in their order. A stop token ends a completion and has no text."""

    def __init__(self, request: PreparedRequest) -> None:
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = IncrementalDetokenizer(
            request.codec, request.token_ids, skip_special_tokens=request.skips_special_tokens
        )
        self._stop_scanner = StopStringScanner(request.stop_strings, keeps_stop=request.keeps_stop)
        self._stop_token_ids = frozenset(() if request.keeps_stop else request.stop_token_ids)
        self.has_stop_strings = bool(request.stop_strings)
        """Whether tokens must be converted one by one, to find the token that completes a stop string."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.has_stop_strings and self._stop_scanner.stopped

    @property
    def stopped_by(self) -> str:
        """The stop string that is complete. Empty while none is."""
        return self._stop_scanner.stopped_by

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advances over tokens that the client already has."""
        if self.has_stop_strings:
            for number, token_id in enumerate(self._without_stop_tokens(token_ids), start=1):
                self._scan(token_id, number)
        else:
            self.extend(token_ids)

    def append(self, token_id: int, number: int) -> str:
        """The text that the completion's token number `number`, from 1, adds. Stop strings are found."""
        return "" if token_id in self._stop_token_ids else self._scan(token_id, number)

    def extend(self, token_ids: Sequence[int]) -> str:
        """The text that tokens add, converted in one call. Stop strings are not found."""
        return self._detokenizer.extend(self._without_stop_tokens(token_ids))

    def finish(self, completion_tokens: int) -> str:
        """The text that was held back: it can be a part of a character or of a stop string, which it can complete."""
        rest = ""
        if not self.stopped:
            may_stop = completion_tokens > self._min_tokens
            rest = self._stop_scanner.scan(self._detokenizer.flush(), may_stop=may_stop)
        return rest + self._stop_scanner.flush()

    def _scan(self, token_id: int, number: int) -> str:
        may_stop = number > self._min_tokens
        return self._stop_scanner.scan(self._detokenizer.append(token_id), may_stop=may_stop)

    def _without_stop_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self._stop_token_ids.isdisjoint(token_ids):
            return token_ids
        return [token_id for token_id in token_ids if token_id not in self._stop_token_ids]
