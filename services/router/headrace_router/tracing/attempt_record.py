"""What a router records of one attempt: its steps on the router's clock, its decision, and the spans made from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, receipt_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import HeadraceError
from headrace_common.latency.clocks import ClockOffset
from headrace_common.latency.steps import (
    BY_DECODE,
    MAKERS,
    PrefillSteps,
    decode_steps,
    prefill_steps,
)
from headrace_common.tasks import Recent
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import decode_intervals
from headrace_common.telemetry.later import SpanMaker
from headrace_frontend.running.receipt import AttemptReceipt
from headrace_frontend.running.record import AttemptRecord, Attributes, RequestRecord, now_us
from headrace_router.costs import OtherDecision
from headrace_router.decode_link.answer import LinkedAnswer
from headrace_router.placement import Decision, candidate_text
from headrace_router.prefill_queue.task import QueuedTask
from headrace_router.tracing.prefill_task import PrefillTaskRecord, task_spans

_WORKERS_MAX: Final = 4_096
_PAUSE_MIN_US: Final = 5_000
_Report: TypeAlias = prefill_pb2.TaskDone | prefill_pb2.FirstToken
_LINK_METHOD: Final = "headrace.decode.v1.DecodeService/Link"


class WorkerClocks:
    """Relates workers' wall clocks to this router's monotonic clock, as the exchanges of all requests show.

    One event loop owns it. Only the last 4,096 workers are kept.
    """

    def __init__(self) -> None:
        self._clocks: Recent[str, ClockOffset] = Recent(_WORKERS_MAX)

    def clock(self, worker_id: str) -> ClockOffset:
        """The clock of a worker, to add exchanges to."""
        clock = self._clocks[worker_id] = self._clocks.get(worker_id) or ClockOffset()
        return clock


class Regret(NamedTuple):
    """The best other decision, and by how much its first token would have been earlier. Negative: later."""

    other: OtherDecision
    gained_s: float


class Move(NamedTuple):
    """A move of a running answer, or the fetch of a prefix: its workers, the bytes of KV from the source, and when by
    the monotonic clock.

    `gap_ns` is the time of a move without a token for the client. `tokens` are those of a fetch, and `reason` is its
    error's, or empty.
    """

    source: str
    target: str
    payload_bytes: int
    start_ns: int
    end_ns: int = 0
    gap_ns: int = 0
    tokens: int = 0
    reason: str = ""

    def attributes(self) -> Attributes:
        """Those of its span."""
        own: Attributes = {schema.ATTRIBUTE_TOKENS: self.tokens}
        if self.gap_ns:
            own = {schema.ATTRIBUTE_MOVE_GAP_MS: self.gap_ns / 1e6}
        return own | {
            schema.ATTRIBUTE_MOVE_SOURCE_WORKER_ID: self.source,
            schema.ATTRIBUTE_DECODE_WORKER_ID: self.target,
            schema.ATTRIBUTE_PAYLOAD_BYTES: self.payload_bytes,
        }


@dataclass(eq=False, slots=True)
class RoutedAttempt(AttemptRecord):
    """One attempt of this router. Times are microseconds of its clock, 0 or None for what has not happened.

    `context` is None while no attempt has followed the choice of workers.
    The workers' times are known once `update` has found their reports.
    """

    worker_clocks: WorkerClocks = field(default_factory=WorkerClocks, kw_only=True)
    decision: Decision | None = None
    route_error: str = ""
    transfer_id: str = ""
    number: int = 0
    moved: asyncio.Future[Move] | None = None
    """The move that it began with, done before its first token."""
    fetches: list[Move] = field(default_factory=list)
    """The fetch that it began with, if any."""
    more_receipts: list[receipt_pb2.Receipt] = field(default_factory=list)
    """Of further requests to its decode worker."""
    prefill_worker_id: str = ""
    tasks_ahead: int = 0
    task_tokens: int = 0
    priority: str = ""
    done: prefill_pb2.TaskDone | None = None
    """What the prefill worker has reported at its end."""
    parts: list[PrefillTaskRecord] = field(default_factory=list)
    """The tokens before those of its task, where other tasks computed them."""
    _start_ns: int = field(default=0, init=False)
    _answer: LinkedAnswer | None = field(default=None, init=False)
    _queued: QueuedTask | None = field(default=None, init=False)

    @property
    def prefill_cached_tokens(self) -> int:
        return self.done.cached_tokens if self.done is not None else 0

    @property
    def report_bytes(self) -> int:
        return len(self.done.last_link.layers) if self.done is not None else 0

    def routed(self, decision: Decision) -> None:
        """The workers are chosen."""
        self.decision, self.route_end = decision, time.monotonic_ns() // 1_000
        self.block_tokens = decision.worker.layout.block_tokens

    def not_routed(self, error: HeadraceError) -> None:
        """No workers could be chosen."""
        self.route_error, self.route_end = error.detail, now_us()

    def started(self, context: SpanContext, transfer_id: str, *, generated_tokens: int) -> None:
        """The attempt has these ids. `generated_tokens` are those that the answer has already."""
        self.context, self.transfer_id = context, transfer_id
        self.generated_tokens = generated_tokens

    def opened(
        self, answer: LinkedAnswer, first_token: first_token_pb2.FirstTokenPolicy.ValueType
    ) -> None:
        """The decode worker is asked."""
        self._start_ns, self._answer = time.monotonic_ns(), answer
        answer.report_late(self.decoded)
        self.start = self._start_ns // 1_000
        self.remote = self.decision is not None and self.decision.remote
        self.first_token_by = MAKERS.get(first_token, BY_DECODE)

    def enqueued(self, task: QueuedTask) -> None:
        """The prompt is in the prefill queue."""

        def part_ended(part: QueuedTask, done: prefill_pb2.TaskDone) -> None:
            if part.worker is not None:
                worker_id, to = part.worker.worker_id, part.decode.worker_id
                steps, start = self._steps_of(part, worker_id, done), part.task.first_part.end_token
                self.parts.append(PrefillTaskRecord(worker_id, to, done, steps, start, part.tokens))
                if not start and steps is not None:
                    self.parts_start = steps.compute_start
                self.charge_late(done.receipt)

        def ended(done: prefill_pb2.TaskDone) -> None:
            self.done = self.done or done
            self.charge_late(done.receipt)

        self._queued, self.outcome, self.task_tokens = task, task.outcome, task.tokens
        task.report_end(ended)
        for part in task.parts:
            part.report_end(partial(part_ended, part))

    def failed(self, error: HeadraceError) -> None:
        """The attempt has failed."""
        self.error, self.reason = error.detail, error.reason

    def ended(self, queued: QueuedTask | None) -> None:
        """The attempt has ended. `queued` is its prefill task."""
        self.end = time.monotonic_ns() // 1_000
        if queued is not None:
            self.tasks_ahead, self.priority = queued.tasks_ahead, queued.priority.label
            self.prefill_worker_id = queued.worker.worker_id if queued.worker is not None else ""

    def update(self) -> None:
        answer, queued = self._answer, self._queued
        if answer is not None:
            self.reserved = answer.reserved_ns // 1_000 or None
            if answer.times is not None and self.decision is not None:
                self._add_decode(answer, answer.times, self.decision.worker.ref.worker_id)
        if queued is not None:
            self.reserved = self.queued = queued.queued_ns // 1_000
            self.pulled = queued.pulled_ns // 1_000 or None
            if queued.worker is not None and queued.pulled_ns:
                self._add_prefill(queued, queued.worker.worker_id)

    def move(self, prefill_us: int, decode_us: int) -> None:
        AttemptRecord.move(self, prefill_us, decode_us)
        for service, by_us in (("prefill", prefill_us), ("decode", decode_us)):
            worker_id = self.worker_id(service)
            known = self.differences.get(worker_id)
            if known is not None and by_us:
                # The spans of this worker move as its steps do.
                ahead_ns = known.ahead_ns - 1_000 * by_us
                self.differences[worker_id] = known._replace(ahead_ns=ahead_ns)

    def receipt(self) -> AttemptReceipt:
        tasks = [one[:3] for one in self.parts]
        decode = self.worker_id("decode")
        if self.done is not None:
            tasks.append((self.prefill_worker_id, decode, self.done))
        sent = [(source, destination, one.payload_bytes) for source, destination, one in tasks]
        sent += [(one.source, decode, one.payload_bytes) for one in self.fetches]
        links = [
            receipt_pb2.LinkUse(
                source_worker_id=source,
                destination_worker_id=destination,
                payload_bytes=payload_bytes,
            )
            for source, destination, payload_bytes in sent
            if payload_bytes
        ]
        found = AttemptRecord.receipt(self)
        computed = (one.receipt for *_, one in tasks)
        parts = [*computed, *found.parts, *self.more_receipts]
        return found._replace(parts=parts, links=links)

    def charge(self, receipt: receipt_pb2.Receipt) -> None:
        """A request for the KV of this one has cost so much, on this worker or another."""
        self.more_receipts.append(receipt)
        self.charge_late(receipt)

    def close(self) -> None:
        self._answer = self._queued = self.outcome = None

    def _add_decode(
        self, answer: LinkedAnswer, times: decode_pb2.AttemptTimes, worker_id: str
    ) -> None:
        clock = self.worker_clocks.clock(worker_id)
        received_ns = times.received_unix_ns
        replied_ns = received_ns + 1_000 * times.reserved_us
        clock.add_exchange(self._start_ns, received_ns, replied_ns, answer.reserved_ns)
        self.decode = decode_steps(times, self._received_us(clock, worker_id, received_ns))

    def _add_prefill(self, queued: QueuedTask, worker_id: str) -> None:
        first = queued.first_token.result() if queued.first_token.done() else None
        report = self.done if self.done is not None and self.done.HasField("times") else first
        steps = self._steps_of(queued, worker_id, report)
        if steps is None:
            return
        self.prefill = steps
        if first is not None:
            self.prefill = steps._replace(sent=steps.received + first.times.sent_us)

    def _steps_of(
        self, queued: QueuedTask, worker_id: str, report: _Report | None
    ) -> PrefillSteps | None:
        """The steps of a task. None while they or the worker's clock are unknown."""
        if report is None or not report.HasField("times"):
            return None
        times = report.times
        clock = self.worker_clocks.clock(worker_id)
        received_ns = times.received_unix_ns
        if isinstance(report, prefill_pb2.TaskDone):
            replied_ns = received_ns + 1_000 * times.sent_us
            clock.add_exchange(queued.pulled_ns, received_ns, replied_ns, queued.ended_ns)
        if not clock.known:
            return None
        return prefill_steps(times, self._received_us(clock, worker_id, received_ns))

    def _received_us(self, clock: ClockOffset, worker_id: str, received_unix_ns: int) -> int:
        difference = self.differences[worker_id] = clock.difference
        self.error_us = max(self.error_us, difference.error_ns // 1_000)
        return (received_unix_ns - difference.ahead_ns) // 1_000

    def root_attributes(self, request: RequestRecord) -> Attributes:
        regret = regret_of(request)
        if regret is None:
            return {}
        return {
            schema.ATTRIBUTE_OTHER_DECISION: regret.other.kind,
            schema.ATTRIBUTE_OTHER_DECODE_WORKER_ID: regret.other.worker.ref.worker_id,
            schema.ATTRIBUTE_OTHER_PREFILL_WORKER_ID: regret.other.prefill.worker_id,
            schema.ATTRIBUTE_OTHER_GAIN_MS: round(1e3 * regret.gained_s, 3),
        }

    def spans(
        self, request: RequestRecord, maker: SpanMaker, previous: SpanContext | None
    ) -> Iterator[ReadableSpan]:
        decision, own = self.decision, self.context
        if self.route_end:
            attributes = _route_attributes(decision) if decision is not None else {}
            times = (self.route_start, self.route_end)
            yield maker.of_steps(
                schema.SPAN_ROUTE, request.context, times, attributes, self.route_error
            )
        if own is None or decision is None:
            return
        begun = [(schema.SPAN_PREFIX_FETCH, one) for one in self.fetches]
        if self.moved is not None:
            begun.append((schema.SPAN_MOVE, self.moved.result()))
        for name, one in begun:
            times = (one.start_ns // 1_000, one.end_ns // 1_000)
            yield maker.of_steps(name, request.context, times, one.attributes(), one.reason)
        begin = self.start or self.route_end or self.end
        earlier = request.attempts[: request.attempts.index(self)]
        paused = max((one.end or begin for one in earlier), default=begin)
        if begin - paused >= _PAUSE_MIN_US:
            yield maker.of_steps(schema.SPAN_BACK_OFF, request.context, (paused, begin))
        yield maker.of_steps(
            schema.SPAN_ATTEMPT,
            request.context,
            (begin, self.end),
            self._attributes(request, decision),
            self.error,
            context=own,
            link=previous,
        )
        if self.start is not None:
            error = self.error if self.reserved is None else ""
            times = (self.start, self.reserved or self.end)
            yield maker.of_steps(schema.SPAN_RESERVE, own, times, error=error)
        if self.queued is not None:
            yield maker.of_steps(
                schema.SPAN_QUEUE,
                own,
                (self.queued, self.pulled or self.end),
                {
                    schema.ATTRIBUTE_QUEUE_DEPTH: self.tasks_ahead,
                    schema.ATTRIBUTE_PRIORITY: self.priority,
                },
                "never pulled" if self.pulled is None else "",
            )

    def worker_id(self, service: str) -> str:
        """The id of its worker, "decode" or "prefill"."""
        if service == "prefill":
            return self.prefill_worker_id
        return self.decision.worker.ref.worker_id if self.decision is not None else ""

    def worker_spans(self, request: RequestRecord, service: str) -> list[ReadableSpan]:
        """The spans of its worker, "decode" or "prefill", as far as its reports show them."""
        if self.context is None or self.decision is None:
            return []
        number = 2 * request.attempts.index(self) + 1 + (service == "prefill")
        make = self._prefill_spans if service == "prefill" else self._decode_spans
        return list(make(request, request.maker(number=number), self.context, self.decision))

    def _decode_spans(
        self, request: RequestRecord, maker: SpanMaker, parent: SpanContext, decision: Decision
    ) -> Iterator[ReadableSpan]:
        decode = self.decode
        if decode is None:
            return
        times = (decode.received, self.end)
        attributes = _ids(self, request)
        own = maker.of_steps(schema.SPAN_DECODE, parent, times, attributes)
        yield own
        awaits_kv = decode.kv_arrived is not None
        for name, start, end in decode_intervals(decode, self.first_token_by, awaits_kv=awaits_kv):
            if end:
                yield maker.of_steps(name, own.context, (start, end))
        if decode.first_token:
            times = (decode.first_token, self.end)
            yield maker.of_steps(schema.SPAN_DECODE_GENERATE, own.context, times)

    def _prefill_spans(
        self, request: RequestRecord, maker: SpanMaker, parent: SpanContext, decision: Decision
    ) -> Iterator[ReadableSpan]:
        own = PrefillTaskRecord(
            self.prefill_worker_id,
            decision.worker.ref.worker_id,
            self.done or prefill_pb2.TaskDone(),
            self.prefill,
            max((one.end_token for one in self.parts), default=0),
            self.task_tokens,
        )
        for task in (*self.parts, own):
            yield from task_spans(task, maker, parent, _ids(self, request))

    def _attributes(self, request: RequestRecord, decision: Decision) -> Attributes:
        address, _, port = decision.worker.endpoint.rpartition(":")
        attributes: Attributes = {
            **_ids(self, request),
            schema.ATTRIBUTE_ATTEMPT: self.number,
            schema.ATTRIBUTE_DECODE_WORKER_ID: decision.worker.ref.worker_id,
            schema.ATTRIBUTE_PLACEMENT: _placement_of(decision),
            schema.ATTRIBUTE_GENERATED_TOKENS: self.generated_tokens,
            schema.ATTRIBUTE_RPC_SYSTEM: "grpc",
            schema.ATTRIBUTE_RPC_METHOD: _LINK_METHOD,
            schema.ATTRIBUTE_SERVER_ADDRESS: address.strip("[]"),
            schema.ATTRIBUTE_SERVER_PORT: int(port) if port.isdecimal() else 0,
        }
        if self.prefill_worker_id:
            attributes[schema.ATTRIBUTE_PREFILL_WORKER_ID] = self.prefill_worker_id
        if self.reason:
            attributes[schema.ATTRIBUTE_ERROR_REASON] = self.reason
        return attributes


def _ids(attempt: RoutedAttempt, request: RequestRecord) -> Attributes:
    return {
        schema.ATTRIBUTE_REQUEST_ID: request.request_id,
        schema.ATTRIBUTE_TRANSFER_ID: attempt.transfer_id,
    }


def regret_of(request: RequestRecord) -> Regret | None:
    """The regret of a request by its only decision. None without an estimate.

    There is none after a second attempt, and where not the planned worker computed the prompt. Nor is there one where
    the prefill worker or its hidden state made the first token.
    """
    attempt = request.attempts[0] if len(request.attempts) == 1 else None
    if not isinstance(attempt, RoutedAttempt) or attempt.decision is None:
        return None
    decision, decode, prefill = attempt.decision, attempt.decode, attempt.prefill
    if not decision.others or decode is None or decode.first_token is None:
        return None
    other_worker = (
        decision.prefill is not None and decision.prefill.worker_id != attempt.prefill_worker_id
    )
    if other_worker or attempt.first_token_by != BY_DECODE:
        return None
    prompt = decode.first_token
    if decision.remote:
        if prefill is None or prefill.compute_end is None:
            return None
        prompt = prefill.compute_end
    # Messages before that have no part in predictions, and would take as long with another decision.
    observed_s, prompt_s = (1e-6 * (at - decode.received) for at in (decode.first_token, prompt))
    estimates = [(other.estimate_s(prompt_s), other) for other in decision.others]
    estimate_s, best = min(estimates, key=lambda pair: pair[0])
    return Regret(best, observed_s - estimate_s)


def _route_attributes(decision: Decision) -> Attributes:
    return {
        schema.ATTRIBUTE_DECODE_WORKER_ID: decision.worker.ref.worker_id,
        schema.ATTRIBUTE_PLACEMENT: _placement_of(decision),
        schema.ATTRIBUTE_EXPLANATION: decision.explanation,
        schema.ATTRIBUTE_CANDIDATES: "; ".join(map(candidate_text, decision.candidates)),
    }


def _placement_of(decision: Decision) -> str:
    return "remote" if decision.remote else "local"
