"""When those who were refused should come again, so that they do not become the load. Pure but for the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

HINT_S_MIN: Final = 0.2
HINT_S_MAX: Final = 5.0
# More would bring nobody a place sooner, and fewer would leave one empty for a while.
ASKERS_PER_END: Final = 4
_WINDOW_S: Final = 0.5
_STEP: Final = 2.0


class RetryHint:
    """Grows while more ask than `ASKERS_PER_END` for each answer that ends, and shrinks while fewer do."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hint_s = HINT_S_MIN
        self._since_s = clock()
        self._refused = 0
        self._ended = 0

    def ended(self) -> None:
        """One place is free again."""
        self._ended += 1

    def refused(self) -> float:
        """One more was refused: the seconds to tell it."""
        self._refused += 1
        now_s = self._clock()
        elapsed_s = now_s - self._since_s
        if elapsed_s >= _WINDOW_S:
            wanted = ASKERS_PER_END * max(1, self._ended)
            change = min(_STEP, max(1 / _STEP, self._refused / wanted))
            # Whoever was told an old hint has come by now.
            hint_s = self._hint_s * change if elapsed_s < HINT_S_MAX else HINT_S_MIN
            self._hint_s = min(HINT_S_MAX, max(HINT_S_MIN, hint_s))
            self._since_s, self._refused, self._ended = now_s, 0, 0
        return self._hint_s
