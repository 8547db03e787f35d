"""When the first step with each request begins, from the scheduler's hooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class StepStarts:
    """Reports each named request once, when its first step was planned. The scheduling thread calls all methods."""

    def __init__(self, on_start: Callable[[str, int], None]) -> None:
        """`on_start` gets the name and nanoseconds of the host's monotonic clock."""
        self._on_start = on_start
        self._names: dict[str, str] = {}

    def request_added(self, request_id: str, name: str) -> None:
        """The scheduler has a new request. One with an empty name is not reported."""
        if name:
            self._names[request_id] = name

    def step_planned(self, scheduled: Mapping[str, int]) -> None:
        """A step is about to begin. `scheduled` has its requests, with their tokens."""
        if not self._names:
            return
        started = self._names.keys() & scheduled.keys()
        if not started:
            return
        now_ns = time.monotonic_ns()
        for request_id in started:
            self._on_start(self._names.pop(request_id), now_ns)

    def request_finished(self, request_id: str) -> None:
        """The request has ended, perhaps before its first step."""
        self._names.pop(request_id, None)
