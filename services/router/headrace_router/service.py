"""InferenceService: the RPCs that clients call."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import grpc.aio

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.access.roles import Role, current_caller
from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import InvalidRequest, PermissionDenied, Unauthenticated
from headrace_common.latency.clock_pair import clocks_now
from headrace_common.rpc.trace_context import traceparent
from headrace_frontend.admission.admission import Admission
from headrace_frontend.answers import answer_count, request_id_of
from headrace_frontend.request.preparation import RequestPreparer
from headrace_frontend.tenants import DEFAULT_TENANT, TenantAliases, Tenants
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.early_refusal.gate import ArrivedRequest
from headrace_router.lookaside.direct_timeline import RouteTimes
from headrace_router.lookaside.steps import route_steps
from headrace_router.lookaside.tickets import LookAside, candidates_to_proto
from headrace_router.models import ModelCatalog
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.runner import RequestRunner
from headrace_router.tracing.request_span import RequestTracer

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
        runner: RequestRunner,
        admission: Admission,
        preparer: RequestPreparer,
        dispatcher: RequestDispatcher,
        look_aside: LookAside,
        tracer: RequestTracer,
        default_deadline_s: float,
    ) -> None:
        self._models = models
        self._prefixes = prefixes
        self._tenants = tenants
        self._aliases = TenantAliases(tenants)
        self._runner = runner
        self._admission = admission
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._look_aside = look_aside
        self._direct = look_aside.direct
        self._tracer = tracer
        self._default_deadline_s = default_deadline_s

    async def Generate(  # type: ignore[override]
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Streams one response. A cancelled call ends all work for the request."""
        await self._runner.run(
            request,
            self._tenant_of(context),
            _deadline_of(context, self._default_deadline_s),
            context.write,
        )

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
        arrival_unix_ns, arrival_ns, _ = clocks_now()
        deadline = _deadline_of(context, self._default_deadline_s)
        tenant = self._explained_tenant(context) if explains else self._tenant_of(context)
        priority = self._runner.priority_of(request.request.priority, tenant)
        permit = await self._runner.admit(tenant, deadline, priority)
        request_id = request_id_of(request.request)
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
            prepared = prepared.with_priority(priority)
            if not request.explain:
                arrived = ArrivedRequest(prepared, deadline, arrival_ns, root)
                self._runner.refuse_late(arrived, permit)
            await self._runner.wait_turn()
            route_ns = time.monotonic_ns()
            decision = self._dispatcher.route(prepared, root, deadline, request.avoid_worker_ids)
            direct: inference_pb2.DirectRequest | None = None
            caller = permit.tenant if self._tenants.keyed else _host_of(context)
            # Without a free slot, the client's request waits for its share in Generate.
            free = self._admission.has_free_slot(prepared.model)
            one = answer_count(request.request) == 1
            if one and not request.explain and free and self._direct.has_room(caller):
                direct = self._look_aside.grant(
                    *(prepared, decision, self._aliases.alias_of(permit.tenant)),
                    traceparent(root),
                )
            if direct is not None:
                # The request keeps its permit until it has ended on its decode worker.
                ref, release = decision.worker.ref, held.pop_all().close
                times = RouteTimes(arrival_ns, arrival_unix_ns, prepared.tokenized_ns, route_ns)
                self._direct.track(direct, ref, caller, permit, release, times)
            return inference_pb2.RouteResponse(
                worker_id=decision.worker.ref.worker_id,
                incarnation=decision.worker.ref.incarnation,
                remote_prefill=decision.remote,
                explanation=decision.explanation if explains else "",
                candidates=candidates_to_proto(decision.candidates, self._prefixes.faults)
                if explains
                else (),
                direct=direct,
                steps=route_steps(arrival_ns, prepared.tokenized_ns, route_ns)
                if prepared.includes_latency
                else None,
            )

    async def Prefill(
        self,
        request: inference_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.PrefillResponse:
        """Queues the prompt of a direct request, which has reserved blocks on its decode worker itself."""
        arrival_ns = time.monotonic_ns()
        deadline = _deadline_of(context, self._default_deadline_s)
        claims = self._look_aside.check(request)
        self._runner.reject_when_draining()
        prompt_tokens = len(request.direct.token_ids)
        held_permit = self._direct.permit(request.direct.transfer_id)
        if held_permit is not None:
            await held_permit.acquire_tokens(prompt_tokens)
            try:
                response = await self._look_aside.prefill(request, claims, deadline, arrival_ns)
                self._direct.confirm(request.direct.transfer_id)
                return response
            finally:
                held_permit.release_tokens()
        permit = await self._admission.admit(
            *(self._aliases.tenant_of(claims.tenant), deadline),
            Priority.from_proto(request.direct.priority),
        )
        with self._admission.holding(permit):
            await permit.acquire_tokens(prompt_tokens)
            return await self._look_aside.prefill(request, claims, deadline, arrival_ns)

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

    def _explained_tenant(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """The tenant with the caches that an operator asks about."""
        try:
            return self._tenant_of(context)
        except Unauthenticated:
            return DEFAULT_TENANT

    def _tenant_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        return self._tenants.tenant_of(context.invocation_metadata())


def _host_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The client's host, such as "ipv4:10.0.0.7"."""
    return context.peer().rpartition(":")[0]


def _deadline_of(context: grpc.aio.ServicerContext[Any, Any], default_s: float) -> Deadline:
    remaining_s = Deadline.from_context(context, default_s).remaining_s()
    margin_s = min(_DEADLINE_MARGIN_S, _DEADLINE_MARGIN_SHARE * remaining_s)
    return Deadline.after(remaining_s - margin_s)
