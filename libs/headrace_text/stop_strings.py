"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringScanner:
    """Returns text up to the first stop string. Holds back text that may be the beginning of one.

    The first stop string is the one that is complete first. The result therefore does not depend on the pieces in
    which the text arrives.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """`stop_strings` must not contain an empty string."""
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stopped

    def scan(self, text: str) -> str:
        """The text, including text held back before, that cannot be part of a stop string any more."""
        if not self._stop_strings:
            return text
        pending = self._held + text
        match = self._first_match(pending)
        if match is not None:
            self._stopped = True
            self._held = ""
            return pending[: match[1]]
        keep = self._prefix_length(pending)
        self._held = pending[len(pending) - keep :]
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
            if (start := text.find(stop)) >= 0
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
