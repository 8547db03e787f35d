"""When refused callers should retry, so that retries do not become the load. Pure but for the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

HINT_S_MIN: Final = 0.2
HINT_S_MAX: Final = 5.0
# More retries fill a free slot no sooner; fewer leave it empty for a while.
RETRIES_PER_COMPLETION: Final = 4
_WINDOW_S: Final = 0.5
_STEP_FACTOR_MAX: Final = 2.0


class RetryHint:
    """Grows while there are more than RETRIES_PER_COMPLETION refusals per completion; else shrinks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hint_s = HINT_S_MIN
        self._window_start_s = clock()
        self._refusals = 0
        self._completions = 0

    def request_completed(self) -> None:
        """A slot is free again."""
        self._completions += 1

    def request_refused(self) -> float:
        """A request was refused. Returns the seconds after which its caller should retry."""
        self._refusals += 1
        now_s = self._clock()
        elapsed_s = now_s - self._window_start_s
        if elapsed_s >= _WINDOW_S:
            wanted = RETRIES_PER_COMPLETION * max(1, self._completions)
            factor = min(_STEP_FACTOR_MAX, max(1 / _STEP_FACTOR_MAX, self._refusals / wanted))
            # After such a pause, all callers with an old hint have retried.
            hint_s = self._hint_s * factor if elapsed_s < HINT_S_MAX else HINT_S_MIN
            self._hint_s = min(HINT_S_MAX, max(HINT_S_MIN, hint_s))
            self._window_start_s, self._refusals, self._completions = now_s, 0, 0
        return self._hint_s
