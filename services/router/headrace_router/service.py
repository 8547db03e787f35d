"""InferenceService: the RPCs that clients call."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import ExitStack
from typing import Any

import grpc.aio

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.access.roles import Role, current_caller
from headrace_common.deadlines import Deadline
from headrace_common.errors import Draining, InvalidRequest, PermissionDenied, Unauthenticated
from headrace_common.process.pacing import LoopLoad
from headrace_common.rpc.trace_context import traceparent
from headrace_router.admission.admission import Admission, AdmissionPermit
from headrace_router.admission.tenants import DEFAULT_TENANT, Tenants
from headrace_router.dispatch.completion import finish_reason_name
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.lookaside.tickets import LookAside, candidates_to_proto
from headrace_router.metrics import RouterMetrics
from headrace_router.models import ModelCatalog
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.request.preparation import RequestPreparer
from headrace_router.request.request import RoutedRequest
from headrace_router.request.response_stream import ResponseStream
from headrace_router.request.validation import REQUEST_ID_CHARACTERS_MAX
from headrace_router.tracing.request_span import RequestTracer, trace_id_of

# The router's error names what was waited for. It must reach the client before the client's own deadline.
_DEADLINE_MARGIN_S = 0.2
_DEADLINE_MARGIN_SHARE = 0.1


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves requests, and lists the models."""

    def __init__(
        self,
        *,
        models: ModelCatalog,
        prefixes: PrefixCacheDirectory,
        tenants: Tenants,
        admission: Admission,
        preparer: RequestPreparer,
        dispatcher: RequestDispatcher,
        look_aside: LookAside,
        tracer: RequestTracer,
        metrics: RouterMetrics,
        default_deadline_s: float,
    ) -> None:
        self._models = models
        self._prefixes = prefixes
        self._tenants = tenants
        self._admission = admission
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._look_aside = look_aside
        self._direct = look_aside.direct
        self._tracer = tracer
        self._metrics = metrics
        self._default_deadline_s = default_deadline_s
        self._load = LoopLoad()
        self._draining = False

    def drain(self) -> None:
        """Rejects new requests from now on. Requests in flight continue."""
        self._draining = True

    async def Generate(  # type: ignore[override]
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Streams one response. A cancelled call ends all work for the request."""
        arrival_unix_ns = time.time_ns()
        deadline = _deadline_of(context, self._default_deadline_s)
        with self._metrics.count_failures():
            permit = await self._admit(context, deadline)
            with self._admission.holding(permit):
                response = await self._generate(request, context, permit, deadline, arrival_unix_ns)
        self._metrics.count_request(
            finish_reason_name(response.finish_reason),
            (response.first_token_unix_ns - arrival_unix_ns) / 1e6 if response.started else None,
        )

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        permit: AdmissionPermit,
        deadline: Deadline,
        arrival_unix_ns: int,
    ) -> ResponseStream:
        request_id = _request_id(request)
        with self._tracer.request_span(request_id, arrival_unix_ns) as root:
            prepared = await self._preparer.prepare(
                request, request_id, root, deadline, permit.tenant
            )
            await permit.acquire_tokens(len(prepared.token_ids))
            await permit.acquire_slot(prepared.model)
            response = ResponseStream(prepared, trace_id_of(root), self._load)
            routed = RoutedRequest(
                *(prepared, response, root, deadline, arrival_unix_ns, permit.tenant),
                slot_wait_s=lambda: permit.slot_wait_s,
            )
            await self._stream(routed, context, permit)
            return response

    async def _stream(
        self,
        request: RoutedRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        permit: AdmissionPermit,
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
                await context.write(message)
        finally:
            producer.cancel()
            await asyncio.wait({producer})

    async def Route(
        self,
        request: inference_pb2.RouteRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.RouteResponse:
        """The placement of a request, with a ticket for its decode worker unless only an explanation is wanted.

        Costs and cached tokens of the candidates show what others have asked, so they are for operators only, on the
        internal listener. An API key names the tenant to explain for.
        """
        explains = Role.OPERATOR in current_caller().roles
        if request.explain and not explains:
            raise PermissionDenied(
                "an explanation is for the role operator, on internal_listen; call Route without explain",
                metadata={"field": "explain", "allowed_roles": Role.OPERATOR},
            )
        if explains and not request.explain:
            raise InvalidRequest(
                {"explain": "internal_listen only explains; set it, or call Route on listen"}
            )
        arrival_unix_ns = time.time_ns()
        deadline = _deadline_of(context, self._default_deadline_s)
        tenant = self._explained_tenant(context) if explains else self._tenant_of(context)
        self._reject_when_draining()
        permit = await self._admission.admit(tenant, deadline)
        request_id = _request_id(request.request)
        with (
            ExitStack() as held,
            self._tracer.request_span(
                request_id, arrival_unix_ns, stored=not request.explain
            ) as root,
        ):
            held.enter_context(self._admission.holding(permit))
            prepared = await self._preparer.prepare(
                request.request,
                request_id,
                root,
                None if request.explain else deadline,
                permit.tenant,
            )
            decision = self._dispatcher.route(prepared, root, deadline, request.avoid_worker_ids)
            direct: inference_pb2.DirectRequest | None = None
            caller = permit.tenant if self._tenants.keyed else _host_of(context)
            # Without a free slot, the client's request waits for its share in Generate.
            free = self._admission.has_free_slot(prepared.model)
            if not request.explain and free and self._direct.has_room(caller):
                direct = self._look_aside.grant(
                    prepared, decision, permit.tenant, traceparent(root)
                )
            if direct is not None:
                # The request keeps its permit until it has ended on its decode worker.
                ref, release = decision.worker.ref, held.pop_all().close
                self._direct.track(direct, ref, caller, permit, release, arrival_unix_ns)
            return inference_pb2.RouteResponse(
                worker_id=decision.worker.ref.worker_id,
                incarnation=decision.worker.ref.incarnation,
                remote_prefill=decision.remote,
                explanation=decision.explanation if explains else "",
                candidates=candidates_to_proto(decision.candidates, self._prefixes.faults)
                if explains
                else (),
                direct=direct,
            )

    async def Prefill(
        self,
        request: inference_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.PrefillResponse:
        """Queues the prompt of a direct request, which has reserved blocks on its decode worker itself."""
        deadline = _deadline_of(context, self._default_deadline_s)
        claims = self._look_aside.check(request)
        self._reject_when_draining()
        prompt_tokens = len(request.direct.token_ids)
        held_permit = self._direct.permit(request.direct.transfer_id)
        if held_permit is not None:
            await held_permit.acquire_tokens(prompt_tokens)
            try:
                response = await self._look_aside.prefill(request, claims, deadline)
                self._direct.confirm(request.direct.transfer_id)
                return response
            finally:
                held_permit.release_tokens()
        permit = await self._admission.admit(claims.tenant, deadline)
        with self._admission.holding(permit):
            await permit.acquire_tokens(prompt_tokens)
            return await self._look_aside.prefill(request, claims, deadline)

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.ListModelsResponse:
        """The models that at least one live decode worker serves, by name."""
        return inference_pb2.ListModelsResponse(
            models=self._models.list_models(),
            prefix_key_fingerprint=self._prefixes.key_fingerprint,
        )

    async def _admit(
        self, context: grpc.aio.ServicerContext[Any, Any], deadline: Deadline
    ) -> AdmissionPermit:
        """Raises Unauthenticated, Draining, QueueFull or DeadlineExceeded, before any work is done."""
        tenant = self._tenant_of(context)
        self._reject_when_draining()
        return await self._admission.admit(tenant, deadline)

    def _explained_tenant(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """The tenant with the caches that an operator asks about."""
        try:
            return self._tenant_of(context)
        except Unauthenticated:
            return DEFAULT_TENANT

    def _tenant_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        return self._tenants.tenant_of(context.invocation_metadata())

    def _reject_when_draining(self) -> None:
        if self._draining:
            raise Draining("the router is shutting down; use another router, or retry in a moment")


def _host_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The client's host, such as "ipv4:10.0.0.7"."""
    return context.peer().rpartition(":")[0]


def _request_id(request: inference_pb2.GenerateRequest) -> str:
    """The client's id, cut to the size limit: a rejected request can be found by it, too."""
    return request.request_id[:REQUEST_ID_CHARACTERS_MAX] or f"r{secrets.token_hex(12)}"


def _deadline_of(context: grpc.aio.ServicerContext[Any, Any], default_s: float) -> Deadline:
    remaining_s = Deadline.from_context(context, default_s).remaining_s()
    margin_s = min(_DEADLINE_MARGIN_S, _DEADLINE_MARGIN_SHARE * remaining_s)
    return Deadline.after(remaining_s - margin_s)
