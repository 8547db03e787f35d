"""What a router keeps of a request that has ended, from the steps that RPCs have brought, and its spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AttributeValue

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import HeadraceError
from headrace_common.latency.steps import AttemptSteps, FirstTokenBy, RequestSteps
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import decode_intervals
from headrace_common.telemetry.later import ended_span
from headrace_frontend.running.timeline import now_us
from headrace_frontend.running.tracer import NO_RESOURCE, RequestRecord, SpanMaker
from headrace_router.costs import OtherDecision
from headrace_router.placement import Decision, candidate_text
from headrace_router.prefill_queue.task import QueuedTask
from headrace_router.tracing.worker_clocks import clock_attributes


@dataclass(frozen=True, slots=True)
class Regret:
    """The best other decision, and by how much its first token would have been earlier. Negative: later."""

    other: OtherDecision
    gained_s: float

    def attributes(self) -> dict[str, AttributeValue]:
        """Those of the root span."""
        return {
            schema.ATTRIBUTE_OTHER_DECISION: self.other.kind,
            schema.ATTRIBUTE_OTHER_DECODE_WORKER_ID: self.other.worker.ref.worker_id,
            schema.ATTRIBUTE_OTHER_PREFILL_WORKER_ID: self.other.prefill.worker_id,
            schema.ATTRIBUTE_OTHER_GAIN_MS: round(1e3 * self.gained_s, 3),
        }


def regret_of(decision: Decision | None, steps: RequestSteps) -> Regret | None:
    """The regret of a request by its only decision. None without an estimate.

    There is none after a second attempt, and where the prefill worker or its hidden state made the first token.
    """
    if decision is None or not decision.others or len(steps.attempts) != 1:
        return None
    (attempt,) = steps.attempts
    decode, prefill = attempt.decode, attempt.prefill
    if (
        decode is None
        or decode.first_token is None
        or attempt.first_token_by != FirstTokenBy.DECODE
    ):
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


_LINK_METHOD: Final = "headrace.decode.v1.DecodeService/Link"
_RECORD_BYTES: Final = 4_096
_ATTEMPT_BYTES: Final = 2_048


@dataclass(slots=True)
class AttemptFacts:
    """One attempt beside its AttemptSteps. Times are microseconds of the router's clock, 0 for what has not happened.

    `context` has the ids of its span. It is None while no attempt has followed the choice of workers.
    """

    decision: Decision | None = None
    route_end: int = 0
    route_error: str = ""
    context: SpanContext | None = None
    transfer_id: str = ""
    number: int = 0
    generated_tokens: int = 0
    start: int = 0
    end: int = 0
    error: str = ""
    reason: str = ""
    prefill_worker_id: str = ""
    tasks_ahead: int = 0
    priority: str = ""
    done: prefill_pb2.TaskDone | None = None
    """What the prefill worker has reported at its end."""

    def routed(self, decision: Decision) -> None:
        """The workers are chosen."""
        self.decision, self.route_end = decision, now_us()

    def not_routed(self, error: HeadraceError) -> None:
        """No workers could be chosen."""
        self.route_error, self.route_end = error.detail, now_us()

    def started(
        self, context: SpanContext, transfer_id: str, *, number: int, generated_tokens: int
    ) -> None:
        """The attempt has these ids. `generated_tokens` are those that the answer has already."""
        self.context, self.transfer_id, self.start = context, transfer_id, now_us()
        self.number, self.generated_tokens = number, generated_tokens

    def failed(self, error: HeadraceError) -> None:
        """The attempt has failed."""
        self.error, self.reason = error.detail, error.reason

    def ended(self, queued: QueuedTask | None) -> None:
        """The attempt has ended. `queued` is its prefill task."""
        self.end = now_us()
        if queued is not None:
            self.tasks_ahead, self.priority = queued.tasks_ahead, queued.priority.label
            self.prefill_worker_id = queued.worker.worker_id if queued.worker is not None else ""


class MadeSpan(NamedTuple):
    """A span, and the process that did the work that it shows. `worker_id` is empty for a router."""

    service: str
    worker_id: str
    span: ReadableSpan


@dataclass(frozen=True, slots=True)
class RoutedRecord(RequestRecord):
    """A request of this router that has ended."""

    attempts: tuple[AttemptFacts, ...]

    @property
    def regret(self) -> Regret | None:
        """See regret_of. None where not the planned worker computed the prompt."""
        facts = self.attempts[0] if self.attempts else AttemptFacts()
        planned = facts.decision.prefill if facts.decision is not None else None
        if planned is not None and planned.worker_id != facts.prefill_worker_id:
            return None
        return regret_of(facts.decision, self.steps)

    @property
    def stored_bytes(self) -> int:
        """About as many bytes as the record takes."""
        texts = (self.error, *self.root.attributes.values(), *(one.error for one in self.attempts))
        size = sum(4 * len(text) for text in texts if isinstance(text, str))
        reports = (one.done for one in self.attempts)
        size += sum(len(done.last_link.layers) for done in reports if done is not None)
        return size + _RECORD_BYTES + _ATTEMPT_BYTES * len(self.attempts)

    def spans(self, resource: Resource = NO_RESOURCE) -> list[ReadableSpan]:
        """See RequestRecord."""
        return list(_Maker(self, resource).spans())

    def worker_spans(self, attempt: int, service: str) -> list[MadeSpan]:
        """The spans of a worker, "decode" or "prefill", as far as its reports show them."""
        facts, steps = self.attempts[attempt], self.steps.attempts[attempt]
        if facts.context is None or facts.decision is None:
            return []
        maker = _Maker(self, NO_RESOURCE, 2 * attempt + 1 + (service == "prefill"))
        if service == "prefill":
            worker_id, spans = facts.prefill_worker_id, maker.prefill_spans(facts, steps)
        else:
            worker_id = facts.decision.worker.ref.worker_id
            spans = maker.decode_spans(facts, steps)
        return [MadeSpan(service, worker_id, span) for span in spans]


class _Maker(SpanMaker):
    """Adds the spans of attempts."""

    def __init__(self, record: RoutedRecord, resource: Resource, worker: int = 0) -> None:
        super().__init__(record, resource, worker)
        self._record = record

    def spans(self) -> Iterator[ReadableSpan]:
        yield from super().spans()
        record = self._record
        previous: tuple[SpanContext, ...] = ()
        for facts, steps in zip(record.attempts, record.steps.attempts, strict=True):
            yield from self._attempt_spans(facts, steps, previous)
            previous = (facts.context,) if facts.context is not None else previous

    def _root_attributes(self) -> dict[str, AttributeValue]:
        regret = self._record.regret
        other = regret.attributes() if regret is not None else {}
        return super()._root_attributes() | clock_attributes(self._record.differences) | other

    def _attempt_spans(
        self, facts: AttemptFacts, steps: AttemptSteps, previous: tuple[SpanContext, ...]
    ) -> Iterator[ReadableSpan]:
        decision = facts.decision
        if facts.route_end:
            yield self._span(
                schema.SPAN_ROUTE,
                self._root,
                steps.route_start,
                facts.route_end,
                _route_attributes(decision) if decision is not None else {},
                facts.route_error,
            )
        if facts.context is None or decision is None:
            return
        yield ended_span(
            name=schema.SPAN_ATTEMPT,
            context=facts.context,
            parent=self._root,
            times_unix_ns=(self._unix_of(facts.start), self._unix_of(facts.end)),
            attributes=self._attempt_attributes(facts, decision),
            resource=self._resource,
            error=facts.error,
            links=previous,
        )
        if steps.start is not None:
            error = facts.error if steps.reserved is None else ""
            end = steps.reserved or facts.end
            yield self._span(schema.SPAN_RESERVE, facts.context, steps.start, end, {}, error)
        if steps.queued is not None:
            yield self._span(
                schema.SPAN_QUEUE,
                facts.context,
                steps.queued,
                steps.pulled or facts.end,
                {
                    schema.ATTRIBUTE_QUEUE_DEPTH: facts.tasks_ahead,
                    schema.ATTRIBUTE_PRIORITY: facts.priority,
                },
                "never pulled" if steps.pulled is None else "",
            )

    def decode_spans(self, facts: AttemptFacts, steps: AttemptSteps) -> Iterator[ReadableSpan]:
        """Those of the decode worker."""
        decode = steps.decode
        if decode is None or facts.context is None:
            return
        own = self._span(
            schema.SPAN_DECODE,
            facts.context,
            decode.received,
            facts.end,
            self._worker_attributes(facts),
        )
        yield own
        intervals = decode_intervals(
            decode, steps.first_token_by, awaits_kv=decode.kv_arrived is not None
        )
        for name, start, end in intervals:
            if end:
                yield self._span(name, own.context, start, end)
        if decode.first_token:
            yield self._span(
                schema.SPAN_DECODE_GENERATE, own.context, decode.first_token, facts.end
            )

    def prefill_spans(self, facts: AttemptFacts, steps: AttemptSteps) -> Iterator[ReadableSpan]:
        """Those of the prefill worker."""
        prefill = steps.prefill
        if prefill is None or facts.context is None:
            return
        times = (prefill.received, prefill.compute_end, prefill.last_write, prefill.sent)
        attributes: dict[str, AttributeValue] = {
            **self._worker_attributes(facts),
            schema.ATTRIBUTE_PREFILL_WORKER_ID: facts.prefill_worker_id,
        }
        done = facts.done or prefill_pb2.TaskDone()
        cached = {schema.ATTRIBUTE_CACHED_TOKENS: done.cached_tokens}
        prompt = self._record.root.attributes.get(schema.ATTRIBUTE_PROMPT_TOKENS, 0)
        tokens = int(str(prompt)) + facts.generated_tokens - done.cached_tokens
        attributes |= {**cached, schema.ATTRIBUTE_PAYLOAD_BYTES: done.payload_bytes}
        end = max(time or 0 for time in times)
        own = self._span(schema.SPAN_PREFILL, facts.context, prefill.received, end, attributes)
        yield own
        if prefill.compute_start is not None and prefill.compute_end is not None:
            compute = (prefill.compute_start, prefill.compute_end)
            counts = {**cached, schema.ATTRIBUTE_TOKENS: tokens}
            yield self._span(schema.SPAN_PREFILL_COMPUTE, own.context, *compute, counts)
        if done.HasField("last_link") and facts.decision is not None:
            link = done.last_link
            yield self._span(
                schema.SPAN_TRANSFER_LINK,
                own.context,
                prefill.received + link.start_us,
                prefill.received + link.end_us,
                {
                    schema.ATTRIBUTE_SOURCE_RANK: link.source_rank,
                    schema.ATTRIBUTE_DESTINATION_RANK: link.destination_rank,
                    schema.ATTRIBUTE_DECODE_WORKER_ID: facts.decision.worker.ref.worker_id,
                    schema.ATTRIBUTE_TRANSPORT: link.transport,
                    schema.ATTRIBUTE_STRATEGY: link.strategy,
                    schema.ATTRIBUTE_PAYLOAD_BYTES: link.payload_bytes,
                    schema.ATTRIBUTE_MOVING_MS: link.moving_us / 1e3,
                    schema.ATTRIBUTE_LINK_LAYERS: link.layers,
                },
            )

    def _worker_attributes(self, facts: AttemptFacts) -> dict[str, AttributeValue]:
        return {
            schema.ATTRIBUTE_REQUEST_ID: self._record.request_id,
            schema.ATTRIBUTE_TRANSFER_ID: facts.transfer_id,
        }

    def _attempt_attributes(
        self, facts: AttemptFacts, decision: Decision
    ) -> dict[str, AttributeValue]:
        address, _, port = decision.worker.endpoint.rpartition(":")
        attributes: dict[str, AttributeValue] = {
            schema.ATTRIBUTE_ATTEMPT: facts.number,
            schema.ATTRIBUTE_TRANSFER_ID: facts.transfer_id,
            schema.ATTRIBUTE_REQUEST_ID: self._record.request_id,
            schema.ATTRIBUTE_DECODE_WORKER_ID: decision.worker.ref.worker_id,
            schema.ATTRIBUTE_PLACEMENT: _placement_of(decision),
            schema.ATTRIBUTE_GENERATED_TOKENS: facts.generated_tokens,
            schema.ATTRIBUTE_RPC_SYSTEM: "grpc",
            schema.ATTRIBUTE_RPC_METHOD: _LINK_METHOD,
            schema.ATTRIBUTE_SERVER_ADDRESS: address.strip("[]"),
            schema.ATTRIBUTE_SERVER_PORT: int(port) if port.isdecimal() else 0,
        }
        if facts.prefill_worker_id:
            attributes[schema.ATTRIBUTE_PREFILL_WORKER_ID] = facts.prefill_worker_id
        if facts.reason:
            attributes[schema.ATTRIBUTE_ERROR_REASON] = facts.reason
        return attributes


def _route_attributes(decision: Decision) -> dict[str, AttributeValue]:
    return {
        schema.ATTRIBUTE_DECODE_WORKER_ID: decision.worker.ref.worker_id,
        schema.ATTRIBUTE_PLACEMENT: _placement_of(decision),
        schema.ATTRIBUTE_EXPLANATION: decision.explanation,
        schema.ATTRIBUTE_CANDIDATES: "; ".join(map(candidate_text, decision.candidates)),
    }


def _placement_of(decision: Decision) -> str:
    return "remote" if decision.remote else "local"
