"""Runs requests of clients, for every listener that accepts them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from opentelemetry.trace import Span

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import CallerBounds
from headrace_common.deadlines import Deadline
from headrace_common.errors import Draining
from headrace_common.process.pacing import LoopLoad
from headrace_frontend.answers import AnswerGroup, ResponseWriter, answer_count
from headrace_frontend.request.preparation import RequestPreparer
from headrace_frontend.request.response_stream import ResponseStream, TextOutlet
from headrace_frontend.request.validation import REQUEST_ID_CHARACTERS_MAX, PreparedRequest
from headrace_router.admission.admission import Admission, AdmissionPermit
from headrace_router.dispatch.completion import finish_reason_name
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.dispatch.request import RoutedRequest
from headrace_router.metrics import RouterMetrics
from headrace_router.tracing.request_span import RequestTracer, trace_id_of

_Prepare: TypeAlias = Callable[[Span, str], Awaitable[PreparedRequest]]


@dataclass(frozen=True, slots=True)
class _Terms:
    """What all answers to one request share."""

    tenant: str
    deadline: Deadline
    arrival_unix_ns: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer to run. `prepare` gets its root span and the tenant, and `on_response` its empty response."""

    request_id: str
    prepare: _Prepare
    write: ResponseWriter
    on_response: Callable[[ResponseStream], None] = lambda response: None
    outlet: TextOutlet | None = None


class RequestRunner:
    """Admits, prepares and dispatches requests, and writes their responses."""

    def __init__(
        self,
        *,
        callers: CallerBounds,
        admission: Admission,
        preparer: RequestPreparer,
        dispatcher: RequestDispatcher,
        tracer: RequestTracer,
        metrics: RouterMetrics,
    ) -> None:
        self._callers = callers
        self._admission = admission
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._tracer = tracer
        self._metrics = metrics
        self._load = LoopLoad()
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
        outlet: TextOutlet | None = None,
    ) -> None:
        """Writes the response to `request`, message by message. Cancellation ends all work for the request.

        `outlet` may get the text of some messages instead of `write`, between the first and the last message of a
        single answer. Raises HeadraceError, before or between messages.
        """
        arrival_unix_ns = time.time_ns()
        terms = _Terms(tenant, deadline, arrival_unix_ns)
        request_id = request_id_of(request)

        async def prepare(root: Span, tenant: str) -> PreparedRequest:
            return await self._preparer.prepare(request, request_id, root, deadline, tenant)

        with self._metrics.count_failures():
            if answer_count(request) == 1:
                self.reject_when_draining()
                await self._answer(_Answer(request_id, prepare, write, outlet=outlet), terms)
            else:
                await self._answer_several(AnswerGroup(request, write), request_id, prepare, terms)

    async def _answer_several(
        self, group: AnswerGroup, request_id: str, prepare: _Prepare, terms: _Terms
    ) -> None:
        self.reject_when_draining()

        async def prepare_first(root: Span, tenant: str) -> PreparedRequest:
            return group.first_prepared(await prepare(root, tenant))

        async def run_first() -> None:
            first = _Answer(request_id, prepare_first, group.writer(0), group.first_started)
            await self._answer(first, terms)
            group.first_ended()

        async def run_other(number: int) -> None:
            prepared = await group.prepared(number)

            async def give(root: Span, tenant: str) -> PreparedRequest:
                return prepared

            answer = _Answer(prepared.request_id, give, group.writer(number))
            await self._answer(answer, terms)

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_first())
                for number in range(1, group.count):
                    tasks.create_task(run_other(number))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await group.finish()

    async def _answer(self, answer: _Answer, terms: _Terms) -> None:
        permit = await self._admission.admit(terms.tenant, terms.deadline)
        with self._admission.holding(permit):
            response = await self._run_admitted(answer, permit, terms)
        self._metrics.count_answer(
            finish_reason_name(response.finish_reason), response, terms.arrival_unix_ns
        )

    @asynccontextmanager
    async def admitted(self, tenant: str, deadline: Deadline) -> AsyncIterator[None]:
        """A place over the block, for work that is not a request, such as tokenizing. Raises as `admit` does."""
        with self._metrics.count_failures():
            permit = await self.admit(tenant, deadline)
            with self._admission.holding(permit):
                yield

    async def admit(self, tenant: str, deadline: Deadline) -> AdmissionPermit:
        """A place for one request. Raises Draining, QueueFull or DeadlineExceeded, before any work is done."""
        self.reject_when_draining()
        return await self._admission.admit(tenant, deadline)

    async def wait_turn(self) -> None:
        """Waits until this request's caller may have it routed."""
        await self._callers.wait_turn()

    async def _run_admitted(
        self, answer: _Answer, permit: AdmissionPermit, terms: _Terms
    ) -> ResponseStream:
        with self._tracer.request_span(answer.request_id, terms.arrival_unix_ns) as root:
            prepared = await answer.prepare(root, permit.tenant)
            await permit.acquire_tokens(len(prepared.token_ids))
            await permit.acquire_slot(prepared.model)
            await self.wait_turn()
            response = ResponseStream(prepared, trace_id_of(root), self._load)
            response.count_gaps(self._metrics.token_gaps())
            answer.on_response(response)
            routed = RoutedRequest(
                *(prepared, response, root, terms.deadline, terms.arrival_unix_ns, permit.tenant),
                slot_wait_s=lambda: permit.slot_wait_s,
            )
            if answer.outlet is not None:
                response.use_outlet(answer.outlet)
            await self._stream(routed, answer.write, permit)
            return response

    async def _stream(
        self, request: RoutedRequest, write: ResponseWriter, permit: AdmissionPermit
    ) -> None:
        """Runs the request and writes its response to the client."""
        response = request.response

        async def produce() -> None:
            try:
                await self._dispatcher.run(request)
            # `next_message` raises it again.
            except Exception as error:  # noqa: BLE001
                response.fail(error)

        producer = asyncio.create_task(produce())
        try:
            while (message := await response.next_message()) is not None:
                permit.release_tokens()
                await write(message)
        finally:
            producer.cancel()
            await asyncio.wait({producer})


def request_id_of(request: inference_pb2.GenerateRequest) -> str:
    """The client's id, cut to the size limit: a rejected request can be found by it, too. Else a new one."""
    return request.request_id[:REQUEST_ID_CHARACTERS_MAX] or f"r{secrets.token_hex(12)}"
