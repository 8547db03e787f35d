"""The sum of a direct request, from the router's own steps and the spans of its decode worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from headrace_common.latency.breakdown import Breakdown, break_down
from headrace_common.latency.clock_offset import ClockOffset
from headrace_common.latency.steps import AttemptSteps, DecodeSteps, RequestSteps
from headrace_common.telemetry import schema
from headrace_router.tracing.timeline import AttemptTimeline
from headrace_router.tracing.worker_clocks import ClockDifference, difference_now

_NS_PER_US: Final = 1_000


class SpanTimes(NamedTuple):
    """A decode worker's span, by its wall clock. `wait_ns` is headrace.decode.wait_ms of the span, 0 without."""

    start_ns: int
    end_ns: int
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class RouteTimes:
    """A Route call, in nanoseconds of the monotonic clock. It arrived at `arrival_unix_ns` of the wall clock."""

    arrival_ns: int
    arrival_unix_ns: int
    tokenized_ns: tuple[int, int]
    route_ns: int
    answered_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True, slots=True)
class DirectSum:
    """The sum up to the first token, which the decode worker made at `first_unix_ns` of the router's clock.

    `differences`: how far the workers' clocks are ahead, by worker id.
    """

    breakdown: Breakdown
    first_unix_ns: int
    differences: dict[str, ClockDifference]


class DirectTimeline:
    """The steps of one direct request. One event loop owns it."""

    def __init__(self, route: RouteTimes) -> None:
        self._route = route
        self._prefill: AttemptTimeline | None = None
        self._prefill_ns = 0

    def prefilling(self, timeline: AttemptTimeline, arrival_ns: int) -> None:
        """The client's Prefill call arrived at `arrival_ns` of the monotonic clock."""
        self._prefill, self._prefill_ns = timeline, arrival_ns

    def sum_of(
        self,
        spans: Mapping[str, SpanTimes],
        worker_id: str,
        clock: ClockOffset,
        worker_unix_ns: int | None,
    ) -> DirectSum | None:
        """The sum, from the worker's spans by name. None without a first token, or while its clock is unknown.

        `clock` relates the worker's clock to ours. `worker_unix_ns` is the least that its clock can show now, None if
        unknown.
        """
        decode = spans.get(schema.SPAN_DECODE)
        answer = spans.get(schema.SPAN_DECODE_GENERATE)
        if decode is None or answer is None:
            return None
        reserved = spans.get(schema.SPAN_DECODE_RESERVE)
        # The client sent the request after Route's answer, and called Prefill after the reservation.
        if self._prefill_ns and reserved is not None:
            clock.add_exchange(
                *(self._route.answered_ns, decode.start_ns, reserved.end_ns, self._prefill_ns)
            )
        elif worker_unix_ns is not None:
            clock.add_exchange(
                *(self._route.answered_ns, decode.start_ns, worker_unix_ns, time.monotonic_ns())
            )
        if not clock.known:
            return None
        attempt = self._attempt(spans, clock)
        steps = self._request(attempt)
        first_us = clock.ours_ns(answer.start_ns) // _NS_PER_US
        route = self._route
        differences = dict(self._prefill.differences) if self._prefill is not None else {}
        return DirectSum(
            break_down(replace(steps, first_token=(first_us, 0)), first_us),
            route.arrival_unix_ns + _NS_PER_US * first_us - route.arrival_ns,
            {**differences, worker_id: difference_now(clock)},
        )

    def _request(self, attempt: AttemptSteps) -> RequestSteps:
        start_us, end_us = (time_ns // _NS_PER_US for time_ns in self._route.tokenized_ns)
        decode = attempt.decode
        messages: list[tuple[int, int]] = []
        if decode is not None and attempt.start is not None:
            messages.append((attempt.start, decode.received))
            if self._prefill_ns and decode.reserved is not None:
                messages.append((decode.reserved, self._prefill_ns // _NS_PER_US))
        return RequestSteps(
            self._route.arrival_ns // _NS_PER_US,
            tokenize=((start_us, end_us),),
            messages=tuple(messages),
            attempts=(attempt,),
        )

    def _attempt(self, spans: Mapping[str, SpanTimes], clock: ClockOffset) -> AttemptSteps:
        def at(time_ns: int | None) -> int | None:
            return None if time_ns is None else clock.ours_ns(time_ns) // _NS_PER_US

        def end_of(name: str) -> int | None:
            span = spans.get(name)
            return None if span is None else at(span.end_ns)

        first = spans.get(schema.SPAN_DECODE_FIRST_TOKEN)
        waited = first is not None and first.wait_ns > 0
        decode = DecodeSteps(
            clock.ours_ns(spans[schema.SPAN_DECODE].start_ns) // _NS_PER_US,
            reserved=end_of(schema.SPAN_DECODE_RESERVE),
            kv_arrived=end_of(schema.SPAN_DECODE_KV_WAIT),
            step_start=at(first.start_ns + first.wait_ns) if first and waited else None,
            first_token=at(spans[schema.SPAN_DECODE_GENERATE].start_ns),
        )
        known = self._prefill.collect() if self._prefill is not None else AttemptSteps(0)
        return replace(
            known,
            route_start=self._route.route_ns // _NS_PER_US,
            start=self._route.answered_ns // _NS_PER_US,
            reserved=decode.reserved,
            # Another router may have the prompt.
            remote=self._prefill is not None or decode.kv_arrived is not None,
            decode=decode,
            error_us=known.error_us + clock.error_ns // _NS_PER_US,
        )
