"""The long times without a token of one answer, and their causes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from headrace_frontend.request.response_stream import ResponseTimes

_TIMES_USUAL: Final = 4
"""A gap is long if it is longer than so many usual ones."""


GapCause: TypeAlias = Literal["failure", "client", ""]
"""Why no token came: an attempt failed, the client did not read, or neither."""


class Gap(NamedTuple):
    """A time without a token, or after the last one in which the client did not take the rest."""

    start_unix_ns: int
    end_unix_ns: int
    cause: GapCause


def gaps_of(
    times: ResponseTimes, failures_unix_ns: Sequence[int], end_unix_ns: int
) -> tuple[Gap, ...]:
    """The long gaps of a request that has ended, the earliest first. `failures_unix_ns`: when attempts have failed."""
    last_unix_ns = times.last_token_unix_ns
    if not last_unix_ns:
        return ()
    usual_ns = 1e9 * times.gaps.total / max(1, sum(times.gaps.counts)) if times.gaps else 0.0
    intervals = times.longest_gaps.intervals(_TIMES_USUAL * usual_ns)
    waits = times.client_waits.intervals()
    waits.append((times.finished_unix_ns or end_unix_ns, end_unix_ns))
    rest = (times.finished_unix_ns or last_unix_ns, end_unix_ns)
    if rest[1] - rest[0] > times.client_waits.least_ns:
        intervals.append(rest)
    return tuple(Gap(*one, _cause(*one, failures_unix_ns, waits)) for one in intervals)


def _cause(
    start: int, end: int, failures: Sequence[int], waits: Iterable[tuple[int, int]]
) -> GapCause:
    if any(start <= failure <= end for failure in failures):
        return "failure"
    waited = sum(max(0, min(end, until) - max(start, since)) for since, until in waits)
    return "client" if 2 * waited >= end - start else ""
