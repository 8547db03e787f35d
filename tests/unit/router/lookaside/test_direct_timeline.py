"""The sum of a direct request: from the router's steps, and from spans by the worker's clock."""

from __future__ import annotations

import pytest

from headrace_common.latency.clock_offset import ClockOffset
from headrace_common.latency.parts import Part
from headrace_common.latency.steps import AttemptSteps, PrefillSteps
from headrace_common.telemetry import schema
from headrace_router.lookaside.direct_timeline import (
    DirectSum,
    DirectTimeline,
    RouteTimes,
    SpanTimes,
)
from headrace_router.tracing.timeline import AttemptTimeline
from headrace_router.tracing.worker_clocks import ClockDifference, WorkerClocks

MS = 1_000_000
ARRIVAL_UNIX_NS = 1_700_000_000_000_000_000
AHEAD_NS = ARRIVAL_UNIX_NS + 3_000 * MS
"""Of the worker's wall clock before our monotonic clock, on which the request arrived at 0."""
ROUTE = RouteTimes(0, ARRIVAL_UNIX_NS, (1 * MS, 3 * MS), 4 * MS, 5 * MS)


def spans(**times_ms: tuple[int, int]) -> dict[str, SpanTimes]:
    """The worker's spans, from times in milliseconds of our clock."""
    names = {
        "decode": schema.SPAN_DECODE,
        "reserve": schema.SPAN_DECODE_RESERVE,
        "kv_wait": schema.SPAN_DECODE_KV_WAIT,
        "first_token": schema.SPAN_DECODE_FIRST_TOKEN,
        "generate": schema.SPAN_DECODE_GENERATE,
    }
    return {
        names[name]: SpanTimes(AHEAD_NS + start * MS, AHEAD_NS + end * MS)
        for name, (start, end) in times_ms.items()
    }


class Prefilled(AttemptTimeline):
    """A prefill that this router has queued."""

    def __init__(self) -> None:
        super().__init__(WorkerClocks())
        self.differences = {"p0": ClockDifference(7, 1)}

    def collect(self) -> AttemptSteps:
        steps = PrefillSteps(13_000, 14_000, 34_000, 20_000, 36_000)
        return AttemptSteps(
            0, queued=11_000, pulled=12_000, remote=True, prefill=steps, error_us=100
        )


REMOTE = spans(
    decode=(6, 60), reserve=(6, 8), kv_wait=(8, 37), first_token=(37, 42), generate=(42, 60)
)


def remote_sum(found: dict[str, SpanTimes]) -> DirectSum | None:
    timeline = DirectTimeline(ROUTE)
    timeline.prefilling(Prefilled(), 9 * MS)
    return timeline.sum_of(found, "d0", ClockOffset(), None)


def test_the_parts_of_a_remote_prefill_add_up_on_a_clock_that_is_3_s_ahead() -> None:
    found = remote_sum(REMOTE)
    assert found is not None
    first = found.breakdown.first
    # The client's messages took 1 ms each, so the clock is known exactly.
    assert first.total_us == 42_000 == sum(first.parts_us.values())
    assert found.first_unix_ns == ARRIVAL_UNIX_NS + 42 * MS
    assert first.parts_us == {
        Part.ADMISSION: 2_000,
        Part.TOKENIZE: 2_000,
        Part.ROUTE: 1_000,
        Part.NETWORK: 3_000,
        Part.RESERVE: 4_000,
        Part.QUEUE: 1_000,
        Part.BATCH_WAIT: 1_000,
        Part.PREFILL: 20_000,
        Part.TRANSFER_EXPOSED: 3_000,
        Part.FIRST_STEP: 5_000,
    }
    assert found.breakdown.exposed_us == 3_000
    assert found.breakdown.hidden_us == 14_000
    assert found.breakdown.clock_error_us == 1_100
    assert set(found.differences) == {"p0", "d0"}


def test_a_wait_before_the_first_step_is_a_part_of_its_own() -> None:
    first = REMOTE[schema.SPAN_DECODE_FIRST_TOKEN]
    found = remote_sum({**REMOTE, schema.SPAN_DECODE_FIRST_TOKEN: first._replace(wait_ns=2 * MS)})
    assert found is not None
    assert found.breakdown.first[Part.DECODE_WAIT] == 2_000
    assert found.breakdown.first[Part.FIRST_STEP] == 3_000


def test_a_local_prefill_needs_another_source_of_the_workers_clock() -> None:
    local = spans(decode=(6, 60), reserve=(6, 8), first_token=(8, 42), generate=(42, 60))
    timeline = DirectTimeline(ROUTE)
    assert timeline.sum_of(local, "d0", ClockOffset(), None) is None
    known = ClockOffset()
    known.add_exchange(0, AHEAD_NS, AHEAD_NS, 0)
    found = timeline.sum_of(local, "d0", known, None)
    assert found is not None
    first = found.breakdown.first
    assert first.total_us == 42_000 == sum(first.parts_us.values())
    assert first[Part.PREFILL] == 34_000
    assert first[Part.UNACCOUNTED] == 0


@pytest.mark.parametrize("missing", [schema.SPAN_DECODE, schema.SPAN_DECODE_GENERATE])
def test_a_request_without_a_first_token_has_no_sum(missing: str) -> None:
    assert remote_sum({name: times for name, times in REMOTE.items() if name != missing}) is None
