"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


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
        keep = self._prefix_length(pending)
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

    def _prefix_length(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        return max(
            next(
                (
                    size
                    for size in range(min(len(stop) - 1, len(text)), 0, -1)
                    if text.endswith(stop[:size])
                ),
                0,
            )
            for stop in self._stop_strings
        )
