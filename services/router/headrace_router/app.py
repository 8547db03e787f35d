"""Assembles the parts of a router."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random

import grpc.aio

from headrace.inference.v1 import inference_pb2_grpc, trace_pb2_grpc
from headrace.prefill.v1 import prefill_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.tickets import TicketSigner
from headrace_common.telemetry.setup import Telemetry
from headrace_router.admission.admission import Admission, AdmissionLimits
from headrace_router.admission.tenants import load_tenants
from headrace_router.config import RouterConfig
from headrace_router.dispatch.dispatcher import PolicySource, RequestDispatcher
from headrace_router.lookaside.tickets import LookAside
from headrace_router.lookaside.tracking import DirectRequestTracker
from headrace_router.metrics import RouterMetrics
from headrace_router.models import ModelCatalog
from headrace_router.openai.app import OpenAiApp, OpenAiParts
from headrace_router.placement import KvAware, Placement
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.service import PullService
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.request.client_gate import ClientGate
from headrace_router.request.preparation import RequestPreparer
from headrace_router.runner import RequestRunner
from headrace_router.service import InferenceService
from headrace_router.tracing.request_span import RequestTracer
from headrace_router.tracing.service import OTLP_SERVICE_NAME, SpanCollector, TraceReader
from headrace_router.tracing.store import StoreExporter, TraceLimits, TraceStore
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.slots import DecodeSlots
from headrace_text.codec import TextCodec

SERVICES = (
    "headrace.inference.v1.InferenceService",
    "headrace.inference.v1.TraceService",
    "headrace.prefill.v1.PrefillQueueService",
    OTLP_SERVICE_NAME,
)


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of one router. `update` must be called with every change of the registry's members."""

    inference: InferenceService
    runner: RequestRunner
    workers: WorkerDirectory
    prefixes: PrefixCacheDirectory
    queue: PrefillQueue
    traces: TraceStore
    metrics: RouterMetrics
    direct: DirectRequestTracker
    preparer: RequestPreparer
    gate: ClientGate
    """For the server's interceptors."""
    openai: OpenAiApp
    admission: Admission

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds every servicer in SERVICES."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference, server)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(TraceReader(self.traces), server)
        prefill_pb2_grpc.add_PrefillQueueServiceServicer_to_server(PullService(self.queue), server)
        SpanCollector(self.traces.add_batch, self.direct.on_batch).add_to(server)

    def update(self, members: Collection[registry_pb2.Member]) -> None:
        """Replaces the members that the registry lists."""
        self.workers.update(members)
        self.prefixes.update(members)

    async def close(self) -> None:
        """Ends every stream to workers."""
        self.direct.close()
        self.preparer.close()
        await self.metrics.close()
        await self.prefixes.close()
        await self.workers.close()


def assemble(
    config: RouterConfig,
    codecs: Mapping[str, TextCodec],
    telemetry: Telemetry,
    policy: PolicySource,
    prefix_hash_key: Callable[[], int],
    ticket_key: Callable[[], bytes] = bytes,
    placement: Placement | None = None,
) -> Router:
    """Builds the parts, on the event loop that will own them. The default placement is KvAware.

    `prefix_hash_key` and `ticket_key` return the deployment's keys, or 0 and no bytes while they are unknown.
    """

    def count_refusal(worker_id: str, part: str) -> None:
        metrics.count_ticket_refusal(worker_id, part)

    admission = _build_admission(config, policy)

    def resize_slots(model: str, slots: DecodeSlots) -> None:
        # Requests for other models are rejected.
        if model in codecs:
            admission.resize_slots(model, slots.available())

    workers = WorkerDirectory(
        lambda endpoint: open_channel(endpoint, config),
        config.worker_wait_s,
        count_refusal,
        resize_slots,
    )
    prefixes = PrefixCacheDirectory(
        lambda endpoint: open_channel(endpoint, config), prefix_hash_key
    )
    queue = PrefillQueue(config.max_queued_tasks, config.prefix_wait_s)
    metrics = RouterMetrics(telemetry.metrics.meter, queue, admission, prefixes, workers)
    traces = _build_traces(config, telemetry, metrics)
    signer = TicketSigner(ticket_key, config.ticket_ttl_s, workers.unix_ns)
    dispatcher = RequestDispatcher(
        workers=workers,
        queue=queue,
        placement=placement or KvAware(Random()),
        prefixes=prefixes,
        policy=policy,
        retry_budget=config.retry_budget,
        signer=signer,
        telemetry=telemetry,
        migration_wait_s=config.migration_wait_s,
        on_migration=metrics.count_migration,
    )
    direct = DirectRequestTracker(
        workers,
        telemetry,
        ttl_s=config.ticket_ttl_s,
        longest_s=config.default_deadline_s,
        max_unused=config.max_unused_tickets,
    )
    look_aside = LookAside(
        workers=workers,
        queue=queue,
        dispatcher=dispatcher,
        signer=signer,
        allowed=config.look_aside,
        late_s=config.default_deadline_s,
        direct=direct,
    )
    tenants = load_tenants(config.api_keys_file)
    preparer = RequestPreparer(codecs, workers, telemetry, config.max_bytes_per_token)
    tracer = RequestTracer(telemetry, traces)
    runner = RequestRunner(
        admission=admission,
        preparer=preparer,
        dispatcher=dispatcher,
        tracer=tracer,
        metrics=metrics,
    )
    models = ModelCatalog(codecs, workers, queue)
    inference = InferenceService(
        models=models,
        prefixes=prefixes,
        tenants=tenants,
        runner=runner,
        admission=admission,
        preparer=preparer,
        dispatcher=dispatcher,
        look_aside=look_aside,
        tracer=tracer,
        default_deadline_s=config.default_deadline_s,
    )

    def max_model_len() -> dict[str, int]:
        live = workers.max_model_len()
        return {name: live.get(name) or codec.max_model_len for name, codec in codecs.items()}

    gate = ClientGate(tenants, metrics, max_model_len, config.max_bytes_per_token)
    openai = OpenAiApp(
        OpenAiParts(codecs, models, tenants, runner, preparer, gate, metrics),
        deadline_s=config.default_deadline_s,
        body_bytes_max=config.max_request_bytes,
    )
    return Router(
        *(inference, runner, workers, prefixes, queue, traces, metrics, direct),
        preparer=preparer,
        gate=gate,
        openai=openai,
        admission=admission,
    )


def _build_traces(config: RouterConfig, telemetry: Telemetry, metrics: RouterMetrics) -> TraceStore:
    limits = TraceLimits(config.trace_count, config.max_trace_bytes, config.max_stored_trace_bytes)
    traces = TraceStore(limits, metrics.count_dropped_spans)
    telemetry.add_exporter(StoreExporter(traces))
    return traces


def _build_admission(config: RouterConfig, policy: PolicySource) -> Admission:
    limits = AdmissionLimits(
        max_num_seqs=config.max_concurrent_requests,
        max_queued_tokens=config.max_queued_tokens,
        wait_s=config.admission_wait_s,
    )
    return Admission(limits, lambda: policy.policy.tenant_weights)
