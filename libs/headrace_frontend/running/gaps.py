"""The long times without a token of one answer, and their causes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from headrace_frontend.request.response_stream import ResponseStream

_TIMES_USUAL: Final = 4
"""A gap is long if it is longer than so many usual ones."""


GapCause: TypeAlias = Literal["failure", "client", ""]
"""Why no token came: an attempt failed, the client did not read, or neither."""


class Gap(NamedTuple):
    """A time without a token, or after the last one in which the client did not take the rest.

    By the monotonic clock.
    """

    start_ns: int
    end_ns: int
    cause: GapCause


def gaps_of(response: ResponseStream, failures_ns: Sequence[int], end_ns: int) -> tuple[Gap, ...]:
    """The long gaps of a request that has ended, the earliest first. `failures_ns`: when attempts have failed."""
    last_ns, gaps = response.last_token_ns, response.gaps
    if not last_ns:
        return ()
    usual_ns = 1e9 * gaps.total / max(1, sum(gaps.counts)) if gaps is not None else 0.0
    intervals = response.longest_gaps.intervals(_TIMES_USUAL * usual_ns)
    waits = response.client_waits.intervals()
    waits.append((response.finished_ns or end_ns, end_ns))
    rest = (response.finished_ns or last_ns, end_ns)
    if rest[1] - rest[0] > response.client_waits.least_ns:
        intervals.append(rest)
    return tuple(Gap(*one, _cause(*one, failures_ns, waits)) for one in intervals)


def _cause(
    start: int, end: int, failures: Sequence[int], waits: Iterable[tuple[int, int]]
) -> GapCause:
    if any(start <= failure <= end for failure in failures):
        return "failure"
    waited = sum(max(0, min(end, until) - max(start, since)) for since, until in waits)
    return "client" if 2 * waited >= end - start else ""
