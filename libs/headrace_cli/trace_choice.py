"""Which stored trace a command means."""

from __future__ import annotations

from typing import Final

from headrace.inference.v1 import trace_pb2
from headrace_cli.client import RouterOperator
from headrace_common.errors import NotFound
from headrace_common.trace_view.model import TraceView
from headrace_common.trace_view.reading import read_trace

LAST: Final = "last"
SLOWEST: Final = "slowest"
FAILED: Final = "failed"
SEARCHED_MAX: Final = 256
"""Traces, newest first, among which the slowest or the last failed one is searched."""


async def chosen_trace(client: RouterOperator, name: str, wait_s: float) -> trace_pb2.Trace:
    """The trace with an id, or the last, the slowest, or the last failed one. Raises NotFound."""
    if name not in (SLOWEST, FAILED):
        return await client.trace("" if name == LAST else name, wait_s)
    best: trace_pb2.Trace | None = None
    longest_ns = -1
    for summary in await client.traces(SEARCHED_MAX):
        try:
            trace = await client.trace(summary.trace_id, 0.0)
        except NotFound:
            # The router has dropped it meanwhile.
            continue
        view = read_trace(trace)
        if name == FAILED and is_failed(view):
            return trace
        if name == SLOWEST and view.answered and view.ttft_ns > longest_ns:
            best, longest_ns = trace, view.ttft_ns
    if best is None:
        what = "failed" if name == FAILED else "has a first token"
        raise NotFound(f"none of the stored requests {what}", metadata={"id": name})
    return best


def is_failed(view: TraceView) -> bool:
    """Whether the request, or one of its attempts, failed."""
    return bool(view.error) or any(step.error for step in view.steps)
