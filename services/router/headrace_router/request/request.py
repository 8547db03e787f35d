"""A request on its way through its attempts, and how one of them ended. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.trace import Span

from headrace_common.deadlines import Deadline
from headrace_router.admission.tenants import DEFAULT_TENANT
from headrace_router.request.response_stream import ResponseStream
from headrace_router.request.validation import PreparedRequest


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """One request on its way: what is asked, where the answer goes, and until when."""

    request: PreparedRequest
    answer: ResponseStream
    root: Span
    deadline: Deadline
    arrival_unix_ns: int
    tenant: str = DEFAULT_TENANT
