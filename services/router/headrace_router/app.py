"""Assembles the parts of a router."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import grpc.aio

from headrace.inference.v1 import inference_pb2_grpc, load_pb2_grpc, trace_pb2_grpc
from headrace.kv.v1 import handoff_pb2
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_common.access.authorizer import Authorizer
from headrace_common.callers.bounds import CallerBounds, CallerLimits
from headrace_common.process.pacing import LoopLoad
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import ClientServices, GrpcServer
from headrace_common.telemetry.setup import Telemetry
from headrace_common.tickets import SigningKey, sign_handoff
from headrace_frontend.admission.admission import Admission, AdmissionLimits
from headrace_frontend.openai.answers import ModelParsers
from headrace_frontend.openai.app import OpenAiApp
from headrace_frontend.openai.metrics_page import MetricsPage
from headrace_frontend.openai.parts import OpenAiParts
from headrace_frontend.request.preparation import RequestPreparer
from headrace_frontend.request.size import RequestSizeCheck, needed_request_bytes
from headrace_frontend.salts import CacheSalts
from headrace_frontend.tenants import Tenants, load_tenants, tenant_or_none
from headrace_kv.layout.layout import WorkerRef
from headrace_planner.settings import read_profile
from headrace_router.client_gate import ClientGate
from headrace_router.config import RouterConfig
from headrace_router.dispatch.dispatcher import PolicySource, RequestDispatcher
from headrace_router.dispatch.own_prompts import OwnPrompts
from headrace_router.early_refusal.gate import EarlyRefusal, EarlyRefusalParts
from headrace_router.load import LoadReader
from headrace_router.metrics import RouterMetrics
from headrace_router.models import ModelCatalog
from headrace_router.pairing.pairing import Pairing
from headrace_router.picker.picker import EndpointPicker, PickerParts
from headrace_router.placement import KvAware, Placement
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.service import QueueService
from headrace_router.prefill_queue.task import SignTask
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.runner import RequestRunner
from headrace_router.service import InferenceService
from headrace_router.status.app import StatusApp
from headrace_router.status.reader import StatusParts, StatusReader
from headrace_router.tracing.request_span import RequestTracer
from headrace_router.tracing.service import OTLP_SERVICE_NAME, SpanCollector, TraceReader
from headrace_router.tracing.store import TraceLimits, TraceStore
from headrace_router.tracing.worker_clocks import WorkerClocks
from headrace_router.workers.dials import Dials
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.pairs import PairReporter
from headrace_router.workers.slots import DecodeSlots
from headrace_text.codec import TextCodec

_LOG = logging.getLogger(__name__)

# Gateways wait about a second for a decision by default.
_PICK_S = 10.0

CLIENT_SERVICES = ("headrace.inference.v1.InferenceService",)
INTERNAL_SERVICES = (
    *CLIENT_SERVICES,
    "headrace.inference.v1.LoadService",
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
    preparer: RequestPreparer
    callers: CallerBounds
    """Of every listener for clients."""
    tenants: Tenants
    gate: ClientGate
    """For the interceptors of the client listener."""
    openai: OpenAiApp
    admission: Admission
    pairs: PairReporter
    pairing: Pairing
    queue_service: QueueService
    load: LoadReader
    picker: EndpointPicker
    status: StatusApp | None
    """None without the setting status_listen."""
    status_reader: StatusReader

    def new_server(self, config: RouterConfig) -> GrpcServer:
        """A server with every service of the router. Raises ConfigError."""
        clients = ClientServices(
            *(CLIENT_SERVICES, [self.gate], config.max_request_bytes),
            callers=self.callers,
            tenant_of=partial(tenant_or_none, self.tenants),
        )
        server = GrpcServer(config, INTERNAL_SERVICES, clients)
        self._add_internal(server.server)
        if server.client_server is not None:
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(
                self.inference, server.client_server
            )
        return server

    def _add_internal(self, server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference, server)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(TraceReader(self.traces), server)
        load_pb2_grpc.add_LoadServiceServicer_to_server(self.load, server)
        prefill_pb2_grpc.add_PrefillQueueServiceServicer_to_server(self.queue_service, server)
        SpanCollector(self.traces.add_batch).add_to(server)

    def update(self, members: Collection[registry_pb2.Member]) -> None:
        """Replaces the members that the registry lists."""
        self.workers.update(members)
        self.prefixes.update(members)
        self.pairs.update(members)
        self.pairing.update(members)
        self.status_reader.update(members)

    async def close(self) -> None:
        """Ends every stream to workers."""
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
    ticket_key: SigningKey,
    placement: Placement | None = None,
) -> Router:
    """Builds the parts, on the event loop that will own them. The default placement is KvAware.

    `prefix_hash_key` returns the deployment's key, or 0 while it is unknown. `ticket_key` is the router's own.
    """
    admission = _build_admission(config, policy)

    def resize_slots(model: str, slots: DecodeSlots) -> None:
        # Requests for other models are rejected.
        if model in codecs:
            admission.resize_slots(model, slots.available())

    dials, load = Dials(), LoopLoad()
    workers = WorkerDirectory(
        lambda endpoint: open_channel(endpoint, config),
        ticket_key.public.public_key,
        config.worker_wait_s,
        resize_slots,
        dials,
        load,
    )
    pairing = Pairing(policy)
    queue = PrefillQueue(
        *(config.max_queued_tasks, config.prefix_wait_s),
        sign=_task_signer(ticket_key),
        pairs=pairing,
    )
    prefixes = PrefixCacheDirectory(
        lambda endpoint: open_channel(endpoint, config),
        prefix_hash_key,
        compute_s_per_token=queue.compute_s_per_token,
        dials=dials,
    )
    metrics = RouterMetrics(telemetry.metrics, queue, admission, prefixes, workers)
    limits = TraceLimits(config.trace_count, config.max_trace_bytes, config.max_stored_trace_bytes)
    traces = TraceStore(limits, metrics.count_dropped_spans)
    dispatcher = RequestDispatcher(
        workers=workers,
        queue=queue,
        placement=placement or KvAware(Random()),
        prefixes=prefixes,
        policy=policy,
        retry_budget=config.retry_budget,
        ticket_key_id=ticket_key.public.key_id,
        migration_wait_s=config.migration_wait_s,
        on_migration=metrics.count_migration,
    )
    clocks = WorkerClocks()
    _warn_of_short_requests(config, codecs)
    tenants = load_tenants(config.api_keys_file)
    salts = CacheSalts(by_tenant=config.separates_tenants, prefix_hash_key=prefix_hash_key)
    callers = CallerBounds(CallerLimits.from_config(config), metrics.count_refused)
    preparer = RequestPreparer(codecs, workers, config.max_bytes_per_token, salts.salt_of)
    tracer = RequestTracer(
        *(telemetry, traces, clocks),
        slow_s=config.slow_trace_s,
        on_latency=metrics.count_latency,
    )
    early_refusal = EarlyRefusal(
        EarlyRefusalParts(
            *(queue, workers, prefixes, policy),
            read_profile(Path(config.profile) if config.profile else None),
            by_deadline=config.early_refusal,
            on_prediction=metrics.record_prediction,
            on_refusal=metrics.count_early_refusal,
        )
    )
    runner = RequestRunner(
        callers=callers,
        admission=admission,
        early_refusal=early_refusal,
        policy=policy,
        preparer=preparer,
        dispatcher=dispatcher,
        tracer=tracer,
        metrics=metrics,
        load=load,
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
        tracer=tracer,
        default_deadline_s=config.default_deadline_s,
    )

    def max_model_len() -> dict[str, int]:
        live = workers.max_model_len()
        return {name: live.get(name) or codec.max_model_len for name, codec in codecs.items()}

    size = RequestSizeCheck(max_model_len, config.max_bytes_per_token)
    gate = ClientGate(tenants, metrics, size)
    parsers = {name: ModelParsers(*names) for name, names in config.parsers.items()}
    openai = OpenAiApp(
        OpenAiParts(
            *(codecs, parsers, models, tenants, runner, preparer, size),
            *(metrics.count_failures, callers),
            rejects_unknown_fields=config.reject_unknown_fields,
        ),
        MetricsPage(
            load_tenants(config.metrics_keys_file, "metrics_keys_file"), telemetry.metrics.text
        ),
        deadline_s=config.default_deadline_s,
        body_bytes_max=config.max_request_bytes,
    )
    status_reader = StatusReader(
        StatusParts(workers, queue, admission, policy, traces), config.router_id or config.listen
    )
    return Router(
        *(inference, runner, workers, prefixes, queue, traces, metrics),
        preparer=preparer,
        callers=callers,
        tenants=tenants,
        gate=gate,
        openai=openai,
        admission=admission,
        pairs=PairReporter(),
        pairing=pairing,
        picker=EndpointPicker(
            PickerParts(
                *(tenants, runner, preparer, size, dispatcher, workers, queue, tracer),
                count_pick=metrics.count_pick,
            ),
            deadline_s=min(_PICK_S, config.default_deadline_s),
            body_bytes_max=config.max_request_bytes,
        ),
        queue_service=QueueService(
            queue,
            OwnPrompts(
                *(workers, queue, dispatcher, policy, codecs, traces.start_trace, clocks),
                default_deadline_s=config.default_deadline_s,
            ),
            runner.reject_when_draining,
        ),
        load=LoadReader(codecs, queue, admission, metrics.totals),
        status=_build_status(config, status_reader),
        status_reader=status_reader,
    )


def _task_signer(key: SigningKey) -> SignTask:
    def sign(task: prefill_pb2.PrefillTask, prefill: WorkerRef, layout_hash: bytes) -> bytes:
        claims = handoff_pb2.HandoffClaims(
            transfer_id=task.transfer_id,
            prefill_worker_id=prefill.worker_id,
            prefill_incarnation=prefill.incarnation,
            decode_worker_id=task.decode_worker_id,
            decode_incarnation=task.decode_incarnation,
            layout_hash=layout_hash,
        )
        return sign_handoff(key, claims)

    return sign


def _warn_of_short_requests(config: RouterConfig, codecs: Mapping[str, TextCodec]) -> None:
    for name, codec in codecs.items():
        needed_bytes = needed_request_bytes(codec.max_model_len, config.max_bytes_per_token)
        if needed_bytes > config.max_request_bytes:
            _LOG.warning(
                "a prompt for the context of %s, %d tokens, may need %d bytes: set max_request_bytes, which is %d",
                *(name, codec.max_model_len, needed_bytes, config.max_request_bytes),
            )


def _build_status(config: RouterConfig, reader: StatusReader) -> StatusApp | None:
    return StatusApp(reader, Authorizer.from_config(config)) if config.status_listen else None


def _build_admission(config: RouterConfig, policy: PolicySource) -> Admission:
    limits = AdmissionLimits(
        max_num_seqs=config.max_concurrent_requests,
        max_queued_tokens=config.max_queued_tokens,
        wait_s=config.admission_wait_s,
    )
    return Admission(limits, lambda: policy.policy.tenant_weights)
