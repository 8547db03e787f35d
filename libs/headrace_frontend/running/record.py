"""The record of one request: its ids, its steps, and what its trace shows of it.

Metrics, the stored trace and spans are made from it. While the request runs, it stores little but times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AttributeValue

from headrace.inference.v1 import first_token_pb2, inference_pb2, receipt_pb2, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError
from headrace_common.latency.breakdown import Breakdown, break_down
from headrace_common.latency.clocks import ClockDifference
from headrace_common.latency.steps import MAKERS, AttemptSteps, RequestSteps, alignment_of
from headrace_common.rpc.trace_context import ServedCall
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import (
    breakdown_attributes,
    gen_ai_attributes,
    server_attributes,
    sum_attributes,
)
from headrace_common.telemetry.later import NO_RESOURCE, SpanMaker
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.running.receipt import AttemptReceipt, receipt_attributes, receipt_of

Attributes = dict[str, AttributeValue]

REPORT_WAIT_S: Final = 1.0
"""Longest wait: a report comes at about the time of the first token."""
_GIVEN_UP: Final = "the client gave the request up"
_RECORD_BYTES: Final = 4_096
_ATTEMPT_BYTES: Final = 2_048
_SLOT_WAIT_MIN_US: Final = 1_000
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


@dataclass(eq=False, slots=True)
class AttemptRecord(AttemptSteps):
    """One attempt. Subclasses take the steps from what the workers report."""

    differences: dict[str, ClockDifference] = field(default_factory=dict)
    """How far the clocks of the workers that have reported are ahead of this process's monotonic one, by worker id."""
    error: str = ""
    """Empty unless the attempt has failed."""
    reason: str = ""
    """That of its error."""
    generated_tokens: int = 0
    """Those of the answer before it."""
    decode_receipt: receipt_pb2.Receipt | None = None
    """What it has cost the decode worker, once that has ended it."""
    _on_late: Callable[[receipt_pb2.Receipt], None] | None = None
    end: int = 0
    """When it ended, by the clock of its steps; 0 before that."""
    context: SpanContext | None = None
    """The ids of the attempt's span, if it has one."""
    outcome: asyncio.Future[Any] | None = None
    """The outcome of its prefill, which has the prefill worker's report. None without a remote prefill."""
    block_tokens: int = 0
    """Those of the decode worker's blocks, 0 without a worker."""

    @property
    def prefill_cached_tokens(self) -> int:
        """Tokens in the prefix cache of the prefill worker, 0 until its report."""
        return 0

    @property
    def missing_report(self) -> asyncio.Future[Any] | None:
        """Done once a report of its workers has come that is not there yet."""
        return None if self.outcome is None or self.outcome.done() else self.outcome

    def update(self) -> None:
        """Takes the steps that are known now."""

    def decoded(self, receipt: receipt_pb2.Receipt) -> None:
        """The decode worker has ended it, and this is what it has cost there."""
        self.decode_receipt = receipt
        self.charge_late(receipt)

    def report_late(self, on_late: Callable[[receipt_pb2.Receipt], None]) -> None:
        """`on_late` gets what workers report from now on."""
        self._on_late = on_late

    def charge_late(self, receipt: receipt_pb2.Receipt) -> None:
        """A worker has reported what it has cost, perhaps after the end of the request."""
        if self._on_late is not None:
            self._on_late(receipt)

    @property
    def has_reported(self) -> bool:
        """Whether both of its workers have reported what it has cost."""
        outcome = self.outcome
        return self.decode_receipt is not None and (outcome is None or outcome.done())

    def receipt(self) -> AttemptReceipt:
        """What it has cost, as far as its workers have reported it."""
        parts = () if self.decode_receipt is None else (self.decode_receipt,)
        return AttemptReceipt(parts, self.reason, self.generated_tokens)

    def close(self) -> None:
        """Refers to nothing of the running request any more. It is not updated from now on."""
        self.outcome = None

    def spans(
        self, request: RequestRecord, maker: SpanMaker, previous: SpanContext | None
    ) -> Iterator[ReadableSpan]:
        """Those that this process makes. `previous` has the ids of the attempt before it."""
        yield from ()

    def root_attributes(self, request: RequestRecord) -> Attributes:
        """What the root shows of it."""
        return {}

    @property
    def report_bytes(self) -> int:
        """Bytes of reports that it stores."""
        return 0


@dataclass(eq=False, slots=True, kw_only=True)
class RequestRecord(RequestSteps):
    """One request. One event loop owns it until it has ended.

    `context` has the ids of its root span, with the span `parent` of a client. `arrival_ns` is by the monotonic clock,
    and `arrival_unix_ns` is the same moment, within `clock_error_ns`. `served` is the call that it came by.
    """

    request_id: str
    context: SpanContext
    trace_id: str = field(init=False)
    """As 32 hex characters."""
    parent: SpanContext | None = None
    arrival_ns: int
    arrival_unix_ns: int
    clock_error_ns: int = 0
    served: ServedCall | None = None
    stored: bool = True
    """Whether its trace is stored, where traces are."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    """Oldest first."""
    priority: str = ""
    operation: str = ""
    """That of OpenTelemetry's conventions. Empty until the request was found valid."""
    model: str = ""
    prompt_tokens: int = 0
    conversation_id: str = ""
    prediction: tuple[float, float, str] | None = None
    """Seconds to the first token that were predicted and that were allowed, and the name of the bound."""
    response: ResponseStream | None = None
    """The response, once the request was admitted and prepared, until the request has ended."""
    tokens_ns: tuple[int, int, int] = (0, 0, 0)
    """Arrival of the first, second and last token, by the monotonic clock. 0 without it."""
    gaps: tuple[Gap, ...] = ()
    """The long times without a token, once the request has ended."""
    usage: inference_pb2.Usage | None = None
    """None for a request that has failed."""
    payer: tuple[str, str, str] = ("", "", "")
    """The tenant, the model and the adapter, once the request was found valid."""
    receipt: receipt_pb2.Receipt = field(default_factory=receipt_pb2.Receipt)
    """Once the request has ended."""
    finish_reason: sampling_pb2.FinishReason.ValueType = sampling_pb2.FINISH_REASON_UNSPECIFIED
    first_token_by: first_token_pb2.FirstTokenPolicy.ValueType = (
        first_token_pb2.FIRST_TOKEN_POLICY_DECODE
    )
    error: str = ""
    error_reason: str = ""
    end_unix_ns: int = 0
    """When the request ended. 0 before that."""
    end_us: int = 0
    """When the last report had arrived, by the monotonic clock."""
    _sums: Breakdown | None = field(default=None, init=False)
    _receipt_is_whole: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.trace_id = f"{self.context[0]:032x}"

    @property
    def sampled(self) -> bool:
        """Whether the workers send spans too."""
        return self.context.trace_flags.sampled

    @property
    def differences(self) -> dict[str, ClockDifference]:
        """How far workers' clocks are ahead of this process's wall clock, by worker id."""
        own_ns = self.arrival_unix_ns - self.arrival_ns
        return {
            worker_id: ClockDifference(ahead_ns - own_ns, error_ns + self.clock_error_ns)
            for attempt in self.attempts
            for worker_id, (ahead_ns, error_ns) in attempt.differences.items()
        }

    @property
    def stored_bytes(self) -> int:
        """About as many bytes as the record takes."""
        size = _RECORD_BYTES + 4 * (len(self.error) + len(self.conversation_id))
        for attempt in self.attempts:
            size += _ATTEMPT_BYTES + 4 * len(attempt.error) + attempt.report_bytes
        return size

    def prepared(self, request: inference_pb2.GenerateRequest, prepared: PreparedRequest) -> None:
        """The request is valid, and its prompt has become tokens."""
        start_ns, end_ns = prepared.tokenized_ns
        self.tokenize = (start_ns // 1_000, end_ns // 1_000)
        self.operation = "chat" if request.HasField("chat") else "text_completion"
        self.model, self.prompt_tokens = prepared.served_name, len(prepared.token_ids)
        self.conversation_id = request.conversation_id
        self.payer = prepared.payer

    def predicted(self, total_s: float, allowed_s: float, bound: str) -> None:
        """Its time to first token is predicted, beside the bound of this name."""
        self.prediction = (total_s, allowed_s, bound)

    def starts(self, response: ResponseStream) -> None:
        """The dispatcher fills the response from now on."""
        self.response = response

    def slot_wanted(self) -> None:
        """The wait for a slot on a decode worker begins, or goes on for another reason."""
        self.slot_start, self.slot_end = self.slot_start or time.monotonic_ns() // 1_000, None

    def slot_acquired(self) -> None:
        """The wait for a slot has ended."""
        self.slot_end = time.monotonic_ns() // 1_000

    def update(self) -> None:
        """Takes the steps that are known now."""
        for attempt in self.attempts:
            attempt.update()
        response = self.response
        if response is None or not response.first_token_ns or not self.attempts:
            return
        self.first_token = self._token_at(response.first_token_ns // 1_000)
        if response.second_token_ns:
            self.second_token = self._token_at(response.second_token_ns // 1_000)
        if response.first_message_ns:
            self.first_message = response.first_message_ns // 1_000
        self._align()

    def _align(self) -> None:
        tokens = (self.first_token, self.second_token)
        for index, attempt in enumerate(self.attempts):
            if not attempt.error_us:
                continue
            first_us, second_us = (one[0] if one and one[1] == index else None for one in tokens)
            attempt.move(*alignment_of(attempt, first_us, second_us))

    def receipt_now(self) -> receipt_pb2.Receipt:
        """What the request has cost, as far as it is known."""
        if not self._receipt_is_whole:
            self.receipt = receipt_of([attempt.receipt() for attempt in self.attempts])
            reported = [attempt.has_reported for attempt in self.attempts]
            self._receipt_is_whole = bool(reported) and all(reported)
        return self.receipt

    def break_down(self) -> Breakdown:
        """The sums. Without a first token, the first one lasts to the end of the request, or until now."""
        if not self.end_us:
            self.update()
            return break_down(self, now_us())
        if self._sums is None:
            self._sums = break_down(self, self.end_us)
        return self._sums

    def ended(self, error: BaseException | None) -> None:
        """The request has ended, by an error or with its answer."""
        self.end_unix_ns = time.time_ns()
        if isinstance(error, HeadraceError):
            self.error_reason, self.error = error.reason, error.detail
        elif isinstance(error, asyncio.CancelledError):
            self.error = _GIVEN_UP

    def close(self) -> None:
        """The request has ended, and what its workers reported has arrived."""
        self.update()
        self.end_us = time.monotonic_ns() // 1_000
        response, self.response = self.response, None
        if response is not None:
            self.tokens_ns = (
                response.first_token_ns,
                response.second_token_ns,
                response.last_token_ns,
            )
            failures_ns = [1_000 * one.end for one in self.attempts if one.error]
            own_ns = self.arrival_unix_ns - self.arrival_ns
            self.gaps = gaps_of(response, failures_ns, self.end_unix_ns - own_ns)
            self.usage, self.finish_reason = response.usage, response.finish_reason
            self.first_token_by = response.first_token_by
        self.receipt_now()
        for attempt in self.attempts:
            attempt.close()

    def spans(self, resource: Resource = NO_RESOURCE) -> Iterator[ReadableSpan]:
        """The spans of this process, the root first."""
        maker, breakdown = self.maker(resource), self.break_down()
        yield maker.at(
            schema.SPAN_REQUEST,
            self.parent,
            (self.arrival_unix_ns, self.end_unix_ns),
            self._root_attributes(breakdown),
            self.error,
            context=self.context,
        )
        own = {schema.SPAN_IMAGE_FETCH: self.fetch, schema.SPAN_TOKENIZE: self.tokenize}
        slot = (self.slot_start or 0, self.slot_end or self.end_us)
        if self.slot_start and slot[1] - slot[0] >= _SLOT_WAIT_MIN_US:
            own[schema.SPAN_SLOT_WAIT] = slot
        for name, times_us in own.items():
            if times_us is not None:
                yield maker.of_steps(name, self.context, times_us)
        if self.tokens_ns[0]:
            ahead_ns = self.arrival_unix_ns - self.arrival_ns
            first_ns, second_ns, last_ns = (ahead_ns + one for one in self.tokens_ns)
            yield maker.at(schema.SPAN_FIRST_TOKEN, self.context, (self.arrival_unix_ns, first_ns))
            yield maker.at(schema.SPAN_STREAM, self.context, (first_ns, last_ns))
            if breakdown.second is not None:
                attributes = sum_attributes(breakdown.second)
                times = (first_ns, second_ns)
                yield maker.at(schema.SPAN_SECOND_TOKEN, self.context, times, attributes)
            for start_ns, end_ns, cause in self.gaps:
                attributes = {schema.ATTRIBUTE_GAP_CAUSE: cause}
                times = (ahead_ns + start_ns, ahead_ns + end_ns)
                yield maker.at(schema.SPAN_GAP, self.context, times, attributes)
        previous: SpanContext | None = None
        for attempt in self.attempts:
            yield from attempt.spans(self, maker, previous)
            previous = attempt.context or previous

    def maker(self, resource: Resource = NO_RESOURCE, number: int = 0) -> SpanMaker:
        """Makes spans of this trace."""
        zero_unix_ns = self.arrival_unix_ns - self.arrival_ns
        return SpanMaker(self.context, zero_unix_ns, resource, number)

    def _root_attributes(self, breakdown: Breakdown) -> Attributes:
        """Those of the request, of its answer, of its times, and of its attempts."""
        usage = self.usage
        answered = bool(self.tokens_ns[0])
        known: dict[str, AttributeValue | None] = {
            schema.ATTRIBUTE_REQUEST_ID: self.request_id,
            schema.ATTRIBUTE_PRIORITY: self.priority or None,
            schema.ATTRIBUTE_GEN_AI_OPERATION: self.operation or None,
            schema.ATTRIBUTE_GEN_AI_REQUEST_MODEL: self.model or None,
            schema.ATTRIBUTE_PROMPT_TOKENS: self.prompt_tokens if self.operation else None,
            schema.ATTRIBUTE_CONVERSATION_ID: self.conversation_id or None,
            schema.ATTRIBUTE_ERROR_REASON: self.error_reason or None,
        }
        if self.prediction is not None:
            predicted_s, allowed_s, bound = self.prediction
            known[schema.ATTRIBUTE_PREDICTED_FIRST_TOKEN_S] = round(predicted_s, 6)
            known[schema.ATTRIBUTE_ALLOWED_FIRST_TOKEN_S] = round(allowed_s, 6)
            known[schema.ATTRIBUTE_FIRST_TOKEN_BOUND] = bound
        if usage is not None:
            maker, kept = MAKERS[self.first_token_by].value, usage.HasField("kept")
            known[schema.ATTRIBUTE_FIRST_TOKEN] = maker if answered else None
            known[schema.ATTRIBUTE_COMPLETION_TOKENS] = usage.completion_tokens
            cached = usage.decode_cached_tokens
            known[schema.ATTRIBUTE_CACHED_TOKENS] = cached
            known[schema.ATTRIBUTE_CACHE_READ_TOKENS] = cached
            known[schema.ATTRIBUTE_CACHE_CREATION_TOKENS] = usage.prompt_tokens - cached
            known[schema.ATTRIBUTE_TRANSFERRED_TOKENS] = usage.transferred_tokens
            known[schema.ATTRIBUTE_KEPT_TOKENS] = usage.kept.tokens if kept else None
            known[schema.ATTRIBUTE_FINISH_REASON] = [FINISH_REASON_NAMES[self.finish_reason]]
        attributes: Attributes = {
            **{name: value for name, value in known.items() if value is not None},
            **server_attributes(self.served),
            **breakdown_attributes(breakdown),
            **receipt_attributes(self.receipt),
        }
        if answered:
            attributes |= gen_ai_attributes(breakdown, self.end_unix_ns - self.arrival_unix_ns)
        attributes |= _clock_attributes(self.differences)
        for attempt in self.attempts:
            attributes |= attempt.root_attributes(self)
        return attributes

    async def wait_for_report(self, deadline: Deadline) -> None:
        """Waits for the prefill worker's report, if one is missing, for 1 s at most.

        It waits for half of the time to the deadline at most. The rest is for the answer that the report is a part of.
        """
        report = self._missing_report()
        if report is not None:
            await asyncio.wait({report}, timeout=min(REPORT_WAIT_S, deadline.remaining_s() / 2))

    def when_reported(self, call: Callable[[], None]) -> None:
        """Calls `call` once: now, or when the prefill worker has reported, after 1 s at the latest."""
        report = self._missing_report()
        if report is None:
            call()
            return
        waiting = [call]

        def once(_: object = None) -> None:
            timer.cancel()
            if waiting:
                waiting.pop()()

        timer = asyncio.get_running_loop().call_later(REPORT_WAIT_S, once)
        report.add_done_callback(once)

    def _missing_report(self) -> asyncio.Future[Any] | None:
        """That of the last attempt, if it made a token."""
        if not self.attempts or self.response is None or not self.response.first_token_ns:
            return None
        return self.attempts[-1].missing_report

    def _token_at(self, time_us: int) -> tuple[int, int]:
        """The arrival of a token, with the attempt that was running."""
        index = len(self.attempts) - 1
        while index > 0 and self.attempts[index].route_start > time_us:
            index -= 1
        return time_us, index


def now_us() -> int:
    """Microseconds of the monotonic clock."""
    return time.monotonic_ns() // 1_000


# In telemetry, such as "length".
FINISH_REASON_NAMES: Final = {
    value: name.removeprefix("FINISH_REASON_").lower()
    for name, value in sampling_pb2.FinishReason.items()
}


def _clock_attributes(differences: Mapping[str, ClockDifference]) -> Attributes:
    """Those of a root span about the clocks of its request's workers. None without workers.

    They are for collectors: these receive the workers' spans with the times of the workers' own clocks.
    """
    if not differences:
        return {}
    found = differences.values()
    return {
        schema.ATTRIBUTE_CLOCK_WORKER_IDS: tuple(differences),
        schema.ATTRIBUTE_CLOCK_WORKERS_AHEAD_MS: tuple(one.ahead_ns / 1e6 for one in found),
        schema.ATTRIBUTE_CLOCK_WORKERS_ERROR_MS: tuple(one.error_ns / 1e6 for one in found),
    }


def gaps_of(response: ResponseStream, failures_ns: Sequence[int], end_ns: int) -> tuple[Gap, ...]:
    """The long gaps of a request that has ended, the earliest first. `failures_ns`: when attempts have failed."""
    last_ns, gaps, finished_ns = response.last_token_ns, response.gaps, response.finished_ns
    if not last_ns:
        return ()
    intervals = response.longest_gaps.intervals()
    if intervals and gaps is not None:
        long_ns = _TIMES_USUAL * 1e9 * gaps.total / max(1, sum(gaps.counts))
        intervals = [one for one in intervals if one[1] - one[0] > long_ns]
    if end_ns - (finished_ns or last_ns) > response.client_waits.least_ns:
        intervals.append((finished_ns or last_ns, end_ns))
    waits = [*response.client_waits.intervals(), (finished_ns or end_ns, end_ns)]
    return tuple([Gap(*one, _cause(*one, failures_ns, waits)) for one in intervals])


def _cause(
    start: int, end: int, failures: Sequence[int], waits: Iterable[tuple[int, int]]
) -> GapCause:
    if any(start <= failure <= end for failure in failures):
        return "failure"
    waited = sum(max(0, min(end, until) - max(start, since)) for since, until in waits)
    return "client" if 2 * waited >= end - start else ""
