"""A validated request with everything that the dispatcher needs to run it. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from headrace_common.deadlines import Deadline
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.tenants import DEFAULT_TENANT
from headrace_router.tracing.timeline import RequestTimeline


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """One request from its validation to the end of its response. `root_span` is the root of its trace.

    `slot_wait_s` returns how long it may wait for a decode worker on which its slot is still taken.
    """

    prepared: PreparedRequest
    response: ResponseStream
    root_span: Span
    deadline: Deadline
    arrival_unix_ns: int
    tenant: str = DEFAULT_TENANT
    slot_wait_s: Callable[[], float] = lambda: 0.0
    timeline: RequestTimeline = field(default_factory=RequestTimeline)

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """The prompt and the completion so far."""
        return self.prepared.token_ids + self.response.generated
