"""Runs requests of clients, for every listener that accepts them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from opentelemetry.trace import Span

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import CallerBounds
from headrace_common.callers.priority import Priority, permitted_priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import Draining
from headrace_common.latency.clocks import clocks_now
from headrace_common.process.pacing import LoopLoad
from headrace_common.telemetry import schema
from headrace_frontend.admission.admission import Admission, AdmissionPermit
from headrace_frontend.answers import (
    Answer,
    Outlets,
    ResponseWriter,
    request_id_of,
    run_answers,
    write_response,
)
from headrace_frontend.request.preparation import RequestPreparer
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.request.validation import PreparedRequest
from headrace_router.dispatch.completion import finish_reason_name
from headrace_router.dispatch.dispatcher import PolicySource, RequestDispatcher
from headrace_router.dispatch.request import RoutedRequest
from headrace_router.early_refusal.gate import ArrivedRequest, EarlyRefusal
from headrace_router.metrics import RouterMetrics
from headrace_router.tracing.request_span import RequestTracer, trace_id_of


@dataclass(frozen=True, slots=True)
class _Terms:
    """What all answers to one request share."""

    tenant: str
    priority: Priority
    deadline: Deadline
    arrival_unix_ns: int
    arrival_ns: int
    """By the monotonic clock."""


class RequestRunner:
    """Admits, prepares and dispatches requests, and writes their responses."""

    def __init__(
        self,
        *,
        callers: CallerBounds,
        admission: Admission,
        early_refusal: EarlyRefusal,
        policy: PolicySource,
        preparer: RequestPreparer,
        dispatcher: RequestDispatcher,
        tracer: RequestTracer,
        metrics: RouterMetrics,
        load: LoopLoad,
    ) -> None:
        """`load` is that of the event loop. The workers pace the tokens by it."""
        self._callers = callers
        self._admission = admission
        self._early_refusal = early_refusal
        self._policy = policy
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._tracer = tracer
        self._metrics = metrics
        self._load = load
        self._draining = False

    @property
    def draining(self) -> bool:
        """Whether new requests are rejected."""
        return self._draining

    def drain(self) -> None:
        """Rejects new requests from now on. Requests in flight continue."""
        self._draining = True

    def reject_when_draining(self) -> None:
        """Raises Draining after `drain`."""
        if self._draining:
            raise Draining("the router is shutting down; use another router, or retry in a moment")

    async def run(
        self,
        request: inference_pb2.GenerateRequest,
        tenant: str,
        deadline: Deadline,
        write: ResponseWriter,
        outlets: Outlets | None = None,
    ) -> None:
        """Writes the response to `request`, message by message. Cancellation ends all work for the request.

        `outlets` may get all messages of a single answer but the last, instead of `write`. Raises HeadraceError, before
        or between messages.
        """
        arrival_unix_ns, arrival_ns, _ = clocks_now()
        request_id = request_id_of(request)

        async def prepare(root: Span, tenant: str) -> PreparedRequest:
            return await self._preparer.prepare(request, request_id, root, deadline, tenant)

        with self._metrics.count_failures():
            self.reject_when_draining()
            priority = self.priority_of(request.priority, tenant)
            terms = _Terms(tenant, priority, deadline, arrival_unix_ns, arrival_ns)
            answer = Answer(request_id, prepare, write, outlets=outlets)
            await run_answers(request, answer, partial(self._answer, terms))

    async def _answer(self, terms: _Terms, answer: Answer) -> None:
        permit = await self._admission.admit(terms.tenant, terms.deadline, terms.priority)
        with self._admission.holding(permit):
            response = await self._run_admitted(answer, permit, terms)
        self._metrics.count_answer(
            *(finish_reason_name(response.finish_reason), response, terms.arrival_unix_ns),
            terms.priority,
        )

    @asynccontextmanager
    async def admitted(self, tenant: str, deadline: Deadline) -> AsyncIterator[None]:
        """A place over the block, for work that is not a request, such as tokenizing. Raises as `admit` does."""
        with self._metrics.count_failures():
            permit = await self.admit(tenant, deadline, self.priority_of(0, tenant))
            with self._admission.holding(permit):
                yield

    async def admit(self, tenant: str, deadline: Deadline, priority: Priority) -> AdmissionPermit:
        """A place for one request. Raises Draining, QueueFull or DeadlineExceeded, before any work is done."""
        self.reject_when_draining()
        return await self._admission.admit(tenant, deadline, priority)

    def priority_of(self, requested: int, tenant: str) -> Priority:
        """The class of a request that names the class `requested`. Raises PermissionDenied or InvalidRequest."""
        return permitted_priority(requested, tenant, self._policy.policy.tenant_priorities)

    def refuse_late(self, arrived: ArrivedRequest, permit: AdmissionPermit) -> None:
        """Raises FirstTokenLate for a request with a first token that is predicted to come too late."""
        slot_wait_s = permit.expected_slot_wait_s(arrived.prepared.model)
        self._early_refusal.check(arrived, slot_wait_s)

    async def wait_turn(self) -> None:
        """Waits until this request's caller may have it routed."""
        await self._callers.wait_turn()

    async def _run_admitted(
        self, answer: Answer, permit: AdmissionPermit, terms: _Terms
    ) -> ResponseStream:
        timeline = self._tracer.new_timeline(terms.arrival_unix_ns, terms.arrival_ns)
        with self._tracer.request_span(answer.request_id, timeline) as root:
            root.set_attribute(schema.ATTRIBUTE_PRIORITY, terms.priority.label)
            prepared = await answer.prepare(root, permit.tenant)
            prepared = prepared.with_priority(terms.priority)
            timeline.tokenized(prepared.tokenized_ns)
            await permit.acquire_tokens(len(prepared.token_ids))
            arrived = ArrivedRequest(prepared, terms.deadline, terms.arrival_ns, root)
            self.refuse_late(arrived, permit)
            slot_start_ns = time.monotonic_ns()
            await permit.acquire_slot(prepared.model)
            timeline.slot_acquired(slot_start_ns)
            await self.wait_turn()
            response = ResponseStream(prepared, trace_id_of(root), self._load, paced=True)
            response.count_gaps(self._metrics.token_gaps())
            timeline.responding(response)
            answer.on_response(response)
            routed = RoutedRequest(
                *(prepared, response, root, terms.deadline, terms.arrival_unix_ns, permit.tenant),
                slot_wait_s=lambda: permit.slot_wait_s,
                timeline=timeline,
            )
            await write_response(
                response,
                lambda: self._dispatcher.run(routed),
                answer.write,
                on_message=permit.release_tokens,
                outlets=answer.outlets,
            )
            return response
