"""Stop texts over token borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Lets text through up to the first stop text, and holds back what may become one.

    The first is the one that is complete first, so the answer does not depend on how the text was
    cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` must not hold an empty text."""
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of the answer that is certain now.

        Sets `stopped` when a stop text is complete.
        """
        if not self._stops:
            return text
        pending = self._held + text
        match = self._first_match(pending)
        if match is not None:
            self.stopped = True
            self._held = ""
            return pending[: match[1]]
        keep = self._prefix_length(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def finish(self) -> str:
        """What was held back, now that no stop text can follow."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """End and start of the match that ends first; of those, the one that starts first."""
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        return min(found, default=None)

    def _prefix_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop text."""
        return max(
            next(
                (
                    size
                    for size in range(min(len(stop) - 1, len(text)), 0, -1)
                    if text.endswith(stop[:size])
                ),
                0,
            )
            for stop in self._stops
        )
