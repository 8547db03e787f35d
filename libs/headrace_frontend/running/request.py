"""A request from its arrival to the end of its response. Values only."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from opentelemetry.trace import Span

from headrace_common.deadlines import Deadline
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.running.timeline import AttemptT, RequestTimeline


@dataclass(frozen=True, slots=True)
class ArrivedRequest:
    """A valid request. `arrival_ns` is by the monotonic clock, and `root` is the root span of its trace."""

    prepared: PreparedRequest
    deadline: Deadline
    arrival_ns: int
    root: Span

    @property
    def elapsed_s(self) -> float:
        """The time since the arrival."""
        return 1e-9 * (time.monotonic_ns() - self.arrival_ns)


@dataclass(frozen=True, slots=True)
class AdmittedRequest(Generic[AttemptT]):
    """A request with everything that a dispatcher needs to run it. `root` is the root span of its trace.

    `slot_wait_s` returns how long it may wait for a decode worker on which its slot is still taken.
    """

    prepared: PreparedRequest
    response: ResponseStream
    root: Span
    deadline: Deadline
    timeline: RequestTimeline[AttemptT]
    slot_wait_s: Callable[[], float] = lambda: 0.0

    @property
    def prefix_ids(self) -> array[int]:
        """The prompt and the completion so far, as words that prefixes are hashed from."""
        generated = self.response.generated
        # Lookups of the same object are cached.
        prompt = self.prepared.prefix_ids
        return prompt + array("I", generated) if generated else prompt
