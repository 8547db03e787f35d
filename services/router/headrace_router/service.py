"""InferenceService: the RPCs that clients call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio

from headrace.decode.v1 import decode_pb2_grpc
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, keep_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    HeadraceError,
    NotFound,
    StaleIncarnation,
    WorkerGone,
)
from headrace_common.rpc.field_bounds import DURATION_MAX_S
from headrace_common.rpc.status import error_from_rpc
from headrace_frontend.answers import request_id_of
from headrace_frontend.openai.intake import ClientParts, system_fingerprint
from headrace_frontend.promises import kept_of, no_promise, worker_request
from headrace_frontend.request.model_names import ModelChoice
from headrace_frontend.running.tracer import RequestTracer
from headrace_frontend.tenants import DEFAULT_TENANT, tenant_or_none
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.dispatch.moves import Moves
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.store import stored
from headrace_router.workers.directory import WorkerDirectory


class ModelCatalog:
    """Joins the names that this router serves with the live workers."""

    def __init__(
        self, names: Collection[str], workers: WorkerDirectory, queue: PrefillQueue
    ) -> None:
        self._names = sorted(names)
        self._workers = workers
        self._queue = queue

    def list_models(self) -> list[inference_pb2.Model]:
        """The served models with at least one live decode worker, by name, each followed by its adapters."""
        contexts = self._workers.max_model_len()
        decode_counts = self._workers.decode_worker_counts()
        prefill_counts = self._queue.workers.counts()
        found: list[inference_pb2.Model] = []
        for name in self._names:
            if name in decode_counts:
                model = inference_pb2.Model(
                    name=name,
                    max_model_len=contexts[name],
                    prefill_worker_count=prefill_counts.get(name, 0),
                    decode_worker_count=decode_counts[name],
                )
                found += [model, *self._adapters_of(model)]
        return found

    def system_fingerprint(self, choice: ModelChoice) -> str:
        """As `ModelLister` has it."""
        table = self._workers.table(choice.model, fresh=False)
        return system_fingerprint(table.engine_hashes, choice.adapter)

    def _adapters_of(self, model: inference_pb2.Model) -> Iterator[inference_pb2.Model]:
        table = self._workers.table(model.name)
        prefill_counts = self._queue.workers.counts_by_adapter()
        for name, adapter in sorted(table.adapters.items()):
            # Clients cannot select an adapter by the name of a model.
            if name not in self._names:
                yield inference_pb2.Model(
                    name=name,
                    max_model_len=model.max_model_len,
                    prefill_worker_count=prefill_counts.get((model.name, adapter), 0),
                    decode_worker_count=int(table.serving(adapter).sum()),
                    parent=model.name,
                )


# The router's error names what was waited for. It must reach the client before the client's own deadline.
_DEADLINE_MARGIN_S = 0.2
_DEADLINE_MARGIN_SHARE = 0.1


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves requests, and lists the models."""

    def __init__(
        self,
        parts: ClientParts,
        prefixes: PrefixCacheDirectory,
        dispatcher: RequestDispatcher,
        moves: Moves,
        tracer: RequestTracer,
        endpoints: Mapping[str, str],
    ) -> None:
        """`endpoints` has those of ListModelsResponse, for operators."""
        self._parts = parts
        self._prefixes = prefixes
        self._dispatcher = dispatcher
        self._moves = moves
        self._tracer = tracer
        self._endpoints = dict(endpoints)

    async def Generate(  # type: ignore[override]
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Streams one response. A cancelled call ends all work for the request."""
        tenant = self._tenant_of(context)
        deadline = _deadline_of(context, self._parts.deadline_s)
        write = await stored(self._parts.conversations, request, tenant, context.write)
        await self._parts.runner.run(request, tenant, deadline, write)

    async def Route(
        self,
        request: inference_pb2.RouteRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.RouteResponse:
        """The placement of a request at this moment. Nothing is sent to a worker.

        Costs and cached tokens of the candidates show what others have asked, so only operators may call it. An API key
        names the tenant to explain for.
        """
        deadline = _deadline_of(context, self._parts.deadline_s)
        tenant = self._explained_tenant(context)
        priority = self._parts.runner.priority_of(request.request.priority, tenant)
        request_id = request_id_of(request.request)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(
                self._parts.runner.admitted(tenant, deadline, request.request.priority)
            )
            record = stack.enter_context(self._tracer.record(request_id))
            prepared = await self._parts.preparer.prepare(
                request.request, request_id, None, tenant, priority
            )
            await self._parts.callers.wait_turn()
            record.prepared(request.request, prepared)
            decision = self._dispatcher.route(prepared, record, deadline)
        worker, candidates = decision.worker.ref, decision.candidates
        faults = {ref.worker_id: fault for ref, fault in self._prefixes.faults.items()}
        for candidate in candidates:
            candidate.prefix_fault = faults.get(candidate.worker_id, "")
        return inference_pb2.RouteResponse(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            remote_prefill=decision.remote,
            explanation=decision.explanation,
            candidates=candidates,
        )

    async def MoveAnswer(
        self,
        request: inference_pb2.MoveAnswerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.MoveAnswerResponse:
        """See inference.proto."""
        moves = await self._moves.move_request(request.request_id, request.worker_id)
        return inference_pb2.MoveAnswerResponse(
            moves=[
                inference_pb2.AnswerMove(
                    source_worker_id=one.source,
                    target_worker_id=one.target,
                    payload_bytes=one.payload_bytes,
                    gap_us=one.gap_ns // 1_000,
                )
                for one in moves
            ]
        )

    async def Keep(
        self,
        request: inference_pb2.KeepRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.KeepResponse:
        """Renews or ends a promise to the caller's tenant."""
        tenant = self._tenant_of(context)
        deadline = _deadline_of(context, self._parts.deadline_s)
        async with self._parts.runner.admitted(tenant, deadline):
            kept = await self._parts.keep(tenant, request, deadline)
        return inference_pb2.KeepResponse(kept=kept)

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.ListModelsResponse:
        """The models that at least one live decode worker serves, by name."""
        models = self._parts.models.list_models()
        for model in models:
            parsers = self._parts.parsers[model.parent or model.name]
            model.MergeFrom(
                inference_pb2.Model(
                    tool_call_parser=parsers.tool_calls, reasoning_parser=parsers.reasoning
                )
            )
        return inference_pb2.ListModelsResponse(
            models=models,
            prefix_key_fingerprint=self._prefixes.key_fingerprint,
            **self._endpoints,
        )

    def _explained_tenant(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """The tenant with the caches that an operator asks about."""
        metadata = context.invocation_metadata() or ()
        return tenant_or_none(self._parts.tenants, metadata) or DEFAULT_TENANT

    def _tenant_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        return self._parts.tenants.tenant_of(context.invocation_metadata())


def _deadline_of(context: grpc.aio.ServicerContext[Any, Any], default_s: float) -> Deadline:
    remaining_s = min(DURATION_MAX_S, Deadline.from_context(context, default_s).remaining_s())
    margin_s = min(_DEADLINE_MARGIN_S, _DEADLINE_MARGIN_SHARE * remaining_s)
    return Deadline.after(remaining_s - margin_s)


class PromiseKeeper:
    """Asks the worker that an id names. Nothing is stored here, so every router can do it."""

    def __init__(self, workers: WorkerDirectory) -> None:
        self._workers = workers

    async def keep(
        self, tenant: str, request: inference_pb2.KeepRequest, deadline: Deadline
    ) -> keep_pb2.Kept:
        """See InferenceService.Keep. Raises HeadraceError."""
        asked = worker_request(tenant, request)
        channel = self._workers.channel_of(asked.incarnation)
        if channel is None:
            raise no_promise()
        try:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            answer = await stub.Keep(asked, timeout=deadline.remaining_s())
        except grpc.aio.AioRpcError as rpc_error:
            raise _explained(error_from_rpc(rpc_error)) from rpc_error
        return kept_of(answer.kept, asked.incarnation, asked.transfer_id)


def _explained(error: HeadraceError) -> HeadraceError:
    """A worker that is gone has lost what it promised."""
    return no_promise() if isinstance(error, NotFound | StaleIncarnation | WorkerGone) else error
