"""The front door: InferenceService."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import Draining, HeadraceError
from headrace_common.process.pacing import LoopLoad
from headrace_common.rpc.trace_context import traceparent
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry
from headrace_router.admission.admission import Admission, AdmissionPermit
from headrace_router.admission.tenants import Tenants
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.lookaside.tickets import LookAside, candidates_to_proto
from headrace_router.metrics import RouterMetrics
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.request.request import RoutedRequest
from headrace_router.request.response_stream import ResponseStream
from headrace_router.request.validation import REQUEST_ID_CHARACTERS_MAX, PreparedRequest, prepare
from headrace_router.tracing.store import TraceStore
from headrace_router.workers.directory import WorkerDirectory
from headrace_text.codec import TextCodec

# An error that names what was waited for must reach the client before its own clock ends the call.
_DEADLINE_MARGIN_S = 0.2
_DEADLINE_MARGIN_SHARE = 0.1
_SHORT_REQUEST_BYTES = 1_024


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """Who may come in, and what is counted of those who do."""

    tenants: Tenants
    admission: Admission
    metrics: RouterMetrics


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Takes requests, and lists the models that can be called."""

    def __init__(
        self,
        *,
        codecs: Mapping[str, TextCodec],
        view: WorkerDirectory,
        queue: PrefillQueue,
        prefixes: PrefixCacheDirectory,
        generator: RequestDispatcher,
        look_aside: LookAside,
        store: TraceStore,
        telemetry: Telemetry,
        door: FrontDoor,
        default_deadline_s: float,
    ) -> None:
        self._codecs = codecs
        self._view = view
        self._queue = queue
        self._prefixes = prefixes
        self._generator = generator
        self._look_aside = look_aside
        self._direct = look_aside.direct
        self._store = store
        self._telemetry = telemetry
        self._tenants = door.tenants
        self._admission = door.admission
        self._metrics = door.metrics
        self._default_deadline_s = default_deadline_s
        self._load = LoopLoad()
        self._draining = False

    def drain(self) -> None:
        """Refuses new requests from now on; those in flight go on."""
        self._draining = True

    async def Generate(  # type: ignore[override]
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Streams one answer. Being cancelled ends everything that was begun for it."""
        arrival_unix_ns = time.time_ns()
        deadline = _deadline_of(context, self._default_deadline_s)
        with self._metrics.failures_counted():
            ticket = await self._admit(context, deadline)
            with self._admission.holding(ticket):
                answer = await self._generate(request, context, ticket, deadline, arrival_unix_ns)
        reason = sampling_pb2.FinishReason.Name(answer.finish_reason)
        first_token_ms = (answer.first_token_unix_ns - arrival_unix_ns) / 1e6
        self._metrics.ended(
            reason.removeprefix("FINISH_REASON_").lower(),
            first_token_ms if answer.started else None,
        )

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        ticket: AdmissionPermit,
        deadline: Deadline,
        arrival_unix_ns: int,
    ) -> ResponseStream:
        request_id = _request_id(request)
        with self._request_span(request_id, arrival_unix_ns) as root:
            prepared = await self._prepare(request, request_id, root, deadline)
            await ticket.acquire_tokens(len(prepared.token_ids))
            return await self._answer(prepared, context, ticket, root, deadline, arrival_unix_ns)

    async def Route(
        self,
        request: inference_pb2.RouteRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.RouteResponse:
        """Where a prompt would go; with a ticket for that unless it is for an explanation only."""
        arrival_unix_ns = time.time_ns()
        deadline = _deadline_of(context, self._default_deadline_s)
        ticket = await self._admit(context, deadline)
        request_id = _request_id(request.request)
        with (
            ExitStack() as held,
            self._request_span(request_id, arrival_unix_ns, kept=not request.explain) as root,
        ):
            held.enter_context(self._admission.holding(ticket))
            wait = None if request.explain else deadline
            prepared = await self._prepare(request.request, request_id, root, wait)
            decision = self._generator.route(prepared, root, deadline, request.avoid_worker_ids)
            direct: inference_pb2.DirectRequest | None = None
            if not request.explain:
                direct = self._look_aside.grant(
                    prepared, decision, ticket.tenant, traceparent(root)
                )
            if direct is not None:
                # It counts until it has ended, wherever it is answered.
                ref, release = decision.worker.ref, held.pop_all().close
                self._direct.track(direct, ref, ticket, release, arrival_unix_ns)
            return inference_pb2.RouteResponse(
                worker_id=decision.worker.ref.worker_id,
                incarnation=decision.worker.ref.incarnation,
                remote_prefill=decision.remote,
                explanation=decision.explanation,
                candidates=candidates_to_proto(decision.candidates, self._prefixes.faults),
                direct=direct,
            )

    async def Prefill(
        self,
        request: inference_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.PrefillResponse:
        """The prompt of a request that went past this router takes its turn among the others."""
        deadline = _deadline_of(context, self._default_deadline_s)
        claims = self._look_aside.check(request)
        self._refuse_when_draining()
        tokens = len(request.direct.token_ids)
        counted = self._direct.permit(request.direct.transfer_id)
        if counted is not None:
            await counted.acquire_tokens(tokens)
            try:
                return await self._look_aside.prefill(request, claims, deadline)
            finally:
                counted.release_tokens()
        ticket = await self._admission.admit(claims.tenant, deadline)
        with self._admission.holding(ticket):
            await ticket.acquire_tokens(tokens)
            return await self._look_aside.prefill(request, claims, deadline)

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.ListModelsResponse:
        """The models that at least one live decode worker serves, by name."""
        contexts = self._view.max_model_len()
        decode_counts = self._view.decode_worker_counts()
        prefill_counts = self._queue.worker_counts()
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    name=name,
                    max_model_len=contexts[name],
                    prefill_worker_count=prefill_counts.get(name, 0),
                    decode_worker_count=decode_counts[name],
                )
                for name in sorted(self._codecs)
                if name in decode_counts
            ],
            prefix_key_fingerprint=self._prefixes.key_fingerprint,
        )

    async def _admit(
        self, context: grpc.aio.ServicerContext[Any, Any], deadline: Deadline
    ) -> AdmissionPermit:
        """Raises Unauthenticated, Draining, QueueFull or DeadlineExceeded, before any work is done."""
        tenant = self._tenants.tenant_of(context.invocation_metadata())
        self._refuse_when_draining()
        return await self._admission.admit(tenant, deadline)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Draining("the router is shutting down; ask another one, or again in a moment")

    @contextmanager
    def _request_span(
        self, request_id: str, arrival_unix_ns: int, *, kept: bool = True
    ) -> Iterator[Span]:
        """The root of a request's trace, which tells what the block raises. `kept` is for `headrace trace`."""
        root = self._telemetry.tracer.start_span(
            schema.SPAN_REQUEST,
            start_time=arrival_unix_ns,
            attributes={schema.ATTRIBUTE_REQUEST_ID: request_id},
        )
        if kept:
            self._store.begin(_trace_id(root), request_id, arrival_unix_ns)
        try:
            yield root
        except HeadraceError as error:
            root.set_status(Status(StatusCode.ERROR, error.detail))
            root.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)
            raise
        except asyncio.CancelledError:
            root.set_status(Status(StatusCode.ERROR, "the client gave the request up"))
            raise
        finally:
            root.end()

    async def _answer(
        self,
        prepared: PreparedRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        ticket: AdmissionPermit,
        root: Span,
        deadline: Deadline,
        arrival_unix_ns: int,
    ) -> ResponseStream:
        answer = ResponseStream(prepared, _trace_id(root), self._load)
        job = RoutedRequest(prepared, answer, root, deadline, arrival_unix_ns, ticket.tenant)

        async def produce() -> None:
            try:
                await self._generator.run(job)
            # Whatever it is, it is raised again where the answer is taken.
            except Exception as error:  # noqa: BLE001
                answer.fail(error)

        producer = asyncio.create_task(produce())
        try:
            while (response := await answer.take()) is not None:
                ticket.release_tokens()
                await context.write(response)
        finally:
            producer.cancel()
            await asyncio.wait({producer})
        return answer

    async def _prepare(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        root: Span,
        deadline: Deadline | None,
    ) -> PreparedRequest:
        """Waits for a decode worker where that can help, unless `deadline` is None."""
        prepared = await self._prepare_now(request, request_id, root)
        if deadline is not None and await self._view.wait_for_worker(prepared.model, deadline):
            # Only now it is known how long a context the workers take.
            prepared = await self._prepare_now(request, request_id, root)
        return prepared

    async def _prepare_now(
        self, request: inference_pb2.GenerateRequest, request_id: str, root: Span
    ) -> PreparedRequest:
        start_unix_ns = time.time_ns()
        problem = ""
        try:
            prepare_it = partial(
                prepare,
                request,
                request_id=request_id,
                codecs=self._codecs,
                max_model_len=self._view.max_model_len(),
            )
            # A short prompt takes less time than the way to a thread.
            short = request.ByteSize() <= _SHORT_REQUEST_BYTES
            prepared = prepare_it() if short else await asyncio.to_thread(prepare_it)
        except HeadraceError as error:
            problem = error.detail
            raise
        finally:
            self._telemetry.record_span(
                schema.SPAN_TOKENIZE,
                trace.set_span_in_context(root),
                start_unix_ns,
                time.time_ns(),
                error=problem,
            )
        root.set_attribute(schema.ATTRIBUTE_MODEL, prepared.model)
        root.set_attribute(schema.ATTRIBUTE_PROMPT_TOKENS, len(prepared.token_ids))
        return prepared


def _request_id(request: inference_pb2.GenerateRequest) -> str:
    """The client's own, cut to the size allowed, so that a refused request can be found by it too."""
    return request.request_id[:REQUEST_ID_CHARACTERS_MAX] or f"r{secrets.token_hex(12)}"


def _trace_id(span: Span) -> str:
    return trace.format_trace_id(span.get_span_context().trace_id)


def _deadline_of(context: grpc.aio.ServicerContext[Any, Any], default_s: float) -> Deadline:
    remaining_s = Deadline.from_context(context, default_s).remaining_s()
    margin_s = min(_DEADLINE_MARGIN_S, _DEADLINE_MARGIN_SHARE * remaining_s)
    return Deadline.after(remaining_s - margin_s)
