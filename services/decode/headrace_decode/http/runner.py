"""Runs the requests of this worker's own clients."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from opentelemetry import trace
from opentelemetry.trace import Span

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.callers.bounds import CallerBounds
from headrace_common.callers.priority import Priority, permitted_priority
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_ns
from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InvalidRequest,
)
from headrace_common.latency.breakdown import breakdown_to_proto
from headrace_common.latency.clocks import clocks_now
from headrace_common.process.pacing import LoopLoad
from headrace_common.registry.adapters import adapters_from_proto
from headrace_common.registry.view import RegistryView
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry
from headrace_decode.attempts import Attempts
from headrace_decode.http.admission import OwnAdmission
from headrace_decode.http.own_attempt import OwnAttempt, OwnOutcome, OwnRequest
from headrace_decode.http.prefill import RouterPrefills
from headrace_decode.http.request_span import request_span, trace_id_of
from headrace_decode.http.room import RoomQueue
from headrace_decode.http.timeline import OwnTimeline
from headrace_frontend.admission.admission import AdmissionPermit
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
from headrace_kv.layout.layout import WorkerRef

_LOG = logging.getLogger(__name__)

_FINAL_ERRORS = (Cancelled, DeadlineExceeded, InvalidRequest)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What all answers to one request share."""

    tenant: str
    priority: Priority
    deadline: Deadline
    arrival_unix_ns: int
    arrival_ns: int
    """By the monotonic clock."""


@dataclass(frozen=True, slots=True)
class OwnWorker:
    """The worker that runs the requests. `members` has the prefill workers and the policy."""

    ref: WorkerRef
    model: str
    attempts: Attempts
    prefills: RouterPrefills
    members: RegistryView


class OwnRequestRunner:
    """Admits and prepares requests, and runs them on this worker.

    A prompt goes to a prefill worker through a router. If that fails before the first token, this worker prefills it.
    """

    def __init__(
        self,
        worker: OwnWorker,
        admission: OwnAdmission,
        preparer: RequestPreparer,
        callers: CallerBounds,
        telemetry: Telemetry,
    ) -> None:
        self._worker = worker
        self._admission = admission
        self._preparer = preparer
        self._callers = callers
        self._telemetry = telemetry
        self._room = RoomQueue(worker.attempts)
        self._load = LoopLoad()
        self._draining = False

    def drain(self) -> None:
        """Reports from now on that the worker drains. `Attempts` refuses requests once routers have noticed."""
        self._draining = True

    def reject_when_draining(self) -> None:
        """Raises Draining after `drain`."""
        if self._draining:
            worker_id = self._worker.ref.worker_id
            raise Draining(f"{worker_id} is shutting down", metadata={"worker_id": worker_id})

    async def run(
        self,
        request: inference_pb2.GenerateRequest,
        tenant: str,
        deadline: Deadline,
        write: ResponseWriter,
        outlets: Outlets | None = None,
    ) -> None:
        """See openai.parts.RequestRunner. While the worker drains, `Attempts` refuses requests."""
        request_id = request_id_of(request)

        async def prepare(root: Span, tenant: str) -> PreparedRequest:
            return await self._preparer.prepare(request, request_id, root, deadline, tenant)

        answer = Answer(request_id, prepare, write, outlets=outlets)
        priority = self._priority(request.priority, tenant)
        arrived = clocks_now()
        terms = _Terms(tenant, priority, deadline, arrived.unix_ns, arrived.monotonic_ns)
        await run_answers(request, answer, partial(self._answer, terms))

    @asynccontextmanager
    async def admitted(self, tenant: str, deadline: Deadline) -> AsyncIterator[None]:
        """A place over the block, for work that is not a request, such as tokenizing. Raises as `admit` does."""
        self.reject_when_draining()
        permit = await self._admission.admit(tenant, deadline, self._priority(0, tenant))
        with self._admission.holding(permit):
            yield

    def _priority(self, requested: int, tenant: str) -> Priority:
        """Raises PermissionDenied or InvalidRequest."""
        grants = self._worker.members.policy.tenant_priorities
        return permitted_priority(requested, tenant, grants)

    async def _answer(self, terms: _Terms, answer: Answer) -> None:
        permit = await self._admission.admit(terms.tenant, terms.deadline, terms.priority)
        timeline = OwnTimeline(terms.arrival_ns)
        arrival_unix_ns = terms.arrival_unix_ns
        with (
            self._admission.holding(permit),
            request_span(self._telemetry, answer.request_id, arrival_unix_ns, timeline) as root,
        ):
            prepared = await answer.prepare(root, terms.tenant)
            prepared = prepared.with_priority(terms.priority)
            root.set_attribute(schema.ATTRIBUTE_PRIORITY, terms.priority.label)
            timeline.tokenized(prepared.tokenized_ns)
            unix_ns = arrival_unix_ns - terms.arrival_ns
            start_ns, end_ns = (unix_ns + time_ns for time_ns in prepared.tokenized_ns)
            self._telemetry.record_span(schema.SPAN_TOKENIZE, root, start_ns, end_ns)
            async with self._admission.room(
                *(permit, len(prepared.token_ids), prepared.sampling.max_tokens, terms.deadline)
            ):
                await self._run_admitted(answer, prepared, permit, root, terms, timeline)

    async def _run_admitted(
        self,
        answer: Answer,
        prepared: PreparedRequest,
        permit: AdmissionPermit,
        root: Span,
        terms: _Terms,
        timeline: OwnTimeline,
    ) -> None:
        await self._callers.wait_turn()
        timeline.response = response = ResponseStream(prepared, trace_id_of(root), self._load)
        answer.on_response(response)
        own = OwnRequest(
            *(prepared, response, root, terms.deadline, terms.arrival_unix_ns, timeline),
            room_wait_s=lambda: permit.slot_wait_s,
            times_wanted=root.is_recording() or prepared.includes_latency,
        )
        await write_response(
            response,
            partial(self._fill, own),
            answer.write,
            on_message=permit.release_tokens,
            outlets=answer.outlets,
        )

    async def _fill(self, request: OwnRequest) -> None:
        """Fills and finishes the response. Raises the last attempt's error."""
        worker = self._worker
        request.response.attempt_started(worker.ref)
        remote = self._prefills_remotely(request.prepared)
        first = self._new_attempt(request, remote=remote)
        try:
            outcome, attempts = await first.run(), 1
        except HeadraceError as error:
            useless = isinstance(error, _FINAL_ERRORS) or request.response.started
            if useless or not remote or not first.reserved:
                raise
            _LOG.warning("prefilling %s here: %s", request.prepared.request_id, error.detail)
            outcome, attempts = await self._new_attempt(request, remote=False).run(), 2
        if request.prepared.includes_latency:
            await request.timeline.wait_for_report(request.deadline)
        self._finish(request, outcome, attempts)

    def _new_attempt(self, request: OwnRequest, *, remote: bool) -> OwnAttempt:
        worker = self._worker
        return OwnAttempt(
            *(request, worker.ref.incarnation),
            remote=remote,
            room=self._room,
            prefills=worker.prefills,
        )

    def _prefills_remotely(self, prepared: PreparedRequest) -> bool:
        worker = self._worker
        adapter = prepared.adapter
        missing_min = max(1, worker.members.policy.local_prefill_max_tokens)
        return (
            worker.prefills.available
            and len(prepared.token_ids) - 1 >= missing_min
            and any(
                member.model == worker.model
                and (adapter is None or adapter in adapters_from_proto(member.adapters))
                for member in worker.members.of_role(registry_pb2.Member.ROLE_PREFILL)
            )
        )

    def _finish(self, request: OwnRequest, outcome: OwnOutcome, attempts: int) -> None:
        response, root = request.response, request.root
        now_unix_ns = response.now_unix_ns()
        first_unix_ns = response.first_token_unix_ns or now_unix_ns
        last_unix_ns = response.last_token_unix_ns or now_unix_ns
        timing = inference_pb2.Timing(
            time_to_first_token=duration_from_ns(first_unix_ns - request.arrival_unix_ns),
            total=duration_from_ns(last_unix_ns - request.arrival_unix_ns),
            decode_worker_id=self._worker.ref.worker_id,
            prefill_worker_id=outcome.prefill_worker_id,
            attempts=attempts,
        )
        if request.prepared.includes_latency and response.started:
            timing.latency.CopyFrom(breakdown_to_proto(request.timeline.break_down()))
        response.finish(
            outcome.reason,
            inference_pb2.Usage(
                prompt_tokens=len(request.prepared.token_ids),
                completion_tokens=response.completion_tokens,
                decode_cached_tokens=outcome.cached_tokens,
                transferred_tokens=outcome.transferred_tokens,
            ),
            timing,
        )
        if response.started:
            parent = trace.set_span_in_context(root)
            record = self._telemetry.record_span
            record(schema.SPAN_FIRST_TOKEN, parent, request.arrival_unix_ns, first_unix_ns)
            record(schema.SPAN_STREAM, parent, first_unix_ns, last_unix_ns)
        root.set_attribute(schema.ATTRIBUTE_COMPLETION_TOKENS, response.completion_tokens)
        name = sampling_pb2.FinishReason.Name(response.finish_reason)
        root.set_attribute(
            schema.ATTRIBUTE_FINISH_REASON, [name.removeprefix("FINISH_REASON_").lower()]
        )
