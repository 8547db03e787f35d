"""The steps that vLLM may have planned without having handled their results. Pure."""

from __future__ import annotations

from collections import deque


class StepsUnderWay:
    """With pipeline stages, vLLM plans as many steps as there are stages before it handles the results of the first.

    It handles results after it has planned the next step. So a planned step must not wait while one before it may have
    results.
    """

    def __init__(self, stages: int) -> None:
        self._have_results = deque[bool](maxlen=stages - 1)

    @property
    def may_have_results(self) -> bool:
        """Whether a planned step computes or changes something, and its results may not be handled."""
        return any(self._have_results)

    def add(self, *, has_results: bool) -> None:
        """A step is planned. The results of the oldest of `stages` steps are handled."""
        self._have_results.append(has_results)
