"""Assembles the parts of a router."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random

from headrace.kv.v1 import handoff_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.access.authorizer import Authorizer
from headrace_common.callers.bounds import CallerBounds
from headrace_common.errors import Draining
from headrace_common.process.pacing import LoopLoad
from headrace_common.rpc.channel import open_channel
from headrace_common.telemetry.setup import Telemetry
from headrace_common.tickets import SigningKey, sign_handoff
from headrace_frontend.admission.admission import Admission, AdmissionLimits
from headrace_frontend.conversations import ConversationStore, new_conversation_store
from headrace_frontend.openai.answers import ModelParsers
from headrace_frontend.openai.app import MetricsPage, OpenAiApp
from headrace_frontend.openai.image_fetch import ImageFetcher
from headrace_frontend.openai.intake import OpenAiParts
from headrace_frontend.promises import Keep
from headrace_frontend.request.preparation import RequestPreparer
from headrace_frontend.request.size import RequestSizeCheck, request_bytes_max
from headrace_frontend.running.runner import RequestRunner, RunnerTraits
from headrace_frontend.tenants import CacheSalts, Tenants, load_tenants
from headrace_kv.layout import WorkerRef
from headrace_router.adapters import AdapterChanges, ListMembers, no_registry
from headrace_router.config import RouterConfig
from headrace_router.conversations import OtherRouters
from headrace_router.dispatch.dispatcher import PolicySource, RequestDispatcher
from headrace_router.dispatch.own_prompts import OwnPrompts
from headrace_router.early_refusal import EarlyRefusal
from headrace_router.load import LoadReader
from headrace_router.metrics import RouterMetrics
from headrace_router.picker.picker import EndpointPicker
from headrace_router.placement import KvAware, Placement
from headrace_router.prefill_queue.pairs import Pairing, PairReporter
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.service import QueueService
from headrace_router.prefill_queue.task import SignTask
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.rpc_services import ClientGate, RouterServices
from headrace_router.service import InferenceService, ModelCatalog, PromiseKeeper
from headrace_router.status.app import StatusApp
from headrace_router.status.reader import StatusParts, StatusReader
from headrace_router.tracing.store import TraceLimits, TraceStore
from headrace_router.tracing.timeline import AttemptTimeline
from headrace_router.tracing.tracer import StoringTracer
from headrace_router.tracing.worker_clocks import WorkerClocks
from headrace_router.workers.dials import Dials
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import DecodeSlots
from headrace_text.codec import TextCodec

# Gateways wait about a second for a decision by default.
_PICK_S = 10.0


@dataclass(frozen=True, slots=True)
class _Basis:
    """What a router is made of: see `assemble`."""

    config: RouterConfig
    codecs: Mapping[str, TextCodec]
    telemetry: Telemetry
    policy: PolicySource
    prefix_hash_key: Callable[[], int]
    ticket_key: SigningKey
    adapters: AdapterChanges
    other_routers: OtherRouters


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The workers as this router sees them, and the requests that wait for them."""

    admission: Admission
    workers: WorkerDirectory
    pairing: Pairing
    queue: PrefillQueue
    prefixes: PrefixCacheDirectory
    load: LoopLoad


@dataclass(frozen=True, slots=True)
class _Records:
    """What the router records of its requests."""

    metrics: RouterMetrics
    traces: TraceStore
    clocks: WorkerClocks
    tracer: StoringTracer


@dataclass(frozen=True, slots=True)
class _Requests:
    """The way of a request from any door to the workers."""

    tenants: Tenants
    callers: CallerBounds
    """Of every listener for clients."""
    size: RequestSizeCheck
    bytes_max: int
    preparer: RequestPreparer
    dispatcher: RequestDispatcher
    runner: RequestRunner[AttemptTimeline]
    models: ModelCatalog
    conversations: ConversationStore
    keep: Keep


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of one router. `update` must be called with every change of the registry's members."""

    admission: Admission
    workers: WorkerDirectory
    prefixes: PrefixCacheDirectory
    queue: PrefillQueue
    traces: TraceStore
    metrics: RouterMetrics
    preparer: RequestPreparer
    runner: RequestRunner[AttemptTimeline]
    services: RouterServices
    openai: OpenAiApp
    picker: EndpointPicker
    status: StatusApp | None
    """None without the setting status_listen."""
    followers: tuple[Callable[[Collection[registry_pb2.Member]], None], ...]
    """Get the members at every change."""

    def update(self, members: Collection[registry_pb2.Member]) -> None:
        """Replaces the members that the registry lists."""
        for follow in self.followers:
            follow(members)

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
    list_members: ListMembers = no_registry,
) -> Router:
    """Builds the parts, on the event loop that will own them. The default placement is KvAware.

    `prefix_hash_key` returns the deployment's key, or 0 while it is unknown. `ticket_key` is the router's own.
    `list_members` asks the registry.
    """
    adapters = AdapterChanges(list_members, lambda endpoint: open_channel(endpoint, config), codecs)
    others = OtherRouters(lambda endpoint: open_channel(endpoint, config))
    basis = _Basis(config, codecs, telemetry, policy, prefix_hash_key, ticket_key, adapters, others)
    fleet = _build_fleet(basis)
    records = _build_records(basis, fleet)
    requests = _build_requests(basis, fleet, records, placement or KvAware(Random()))
    status = StatusReader(
        StatusParts(
            fleet.workers,
            fleet.queue,
            fleet.admission,
            policy,
            records.traces,
            traffic=records.metrics.traffic,
        ),
        config.router_id or config.listen,
    )
    return Router(
        admission=fleet.admission,
        workers=fleet.workers,
        prefixes=fleet.prefixes,
        queue=fleet.queue,
        traces=records.traces,
        metrics=records.metrics,
        preparer=requests.preparer,
        runner=requests.runner,
        services=_build_services(basis, fleet, records, requests),
        openai=_build_openai(basis, records, requests),
        picker=_build_picker(basis, fleet, records, requests),
        status=StatusApp(status, Authorizer.from_config(config), adapters)
        if config.status_listen
        else None,
        followers=(
            fleet.workers.update,
            fleet.queue.update_adapters,
            lambda _: fleet.queue.restrict(fleet.workers.decode_only),
            fleet.prefixes.update,
            fleet.pairing.update,
            PairReporter().update,
            status.update,
            others.update,
        ),
    )


def _build_fleet(basis: _Basis) -> _Fleet:
    config = basis.config
    limits = AdmissionLimits(
        max_num_seqs=config.max_concurrent_requests,
        max_queued_tokens=config.max_queued_tokens,
        image_bytes=config.images_mib * 1024**2,
        wait_s=config.admission_wait_s or math.inf,
    )

    def tenant_weights() -> Mapping[str, float]:
        return basis.policy.policy.tenant_weights

    admission = Admission(limits, tenant_weights)

    def resize_slots(model: str, slots: DecodeSlots) -> None:
        # Requests for other models are rejected.
        if model in basis.codecs:
            admission.resize_slots(model, slots.available())

    dials, load = Dials(), LoopLoad()
    workers = WorkerDirectory(
        lambda endpoint: open_channel(endpoint, config),
        basis.ticket_key.public.public_key,
        config.worker_wait_s,
        resize_slots,
        dials,
        load,
        lambda: basis.policy.policy.worker_roles,
    )
    pairing = Pairing(lambda: basis.policy.policy)
    # Each request has one prompt in the queue at most.
    queue = PrefillQueue(
        config.max_concurrent_requests,
        sign=_task_signer(basis.ticket_key),
        pairs=pairing,
        tenant_weights=tenant_weights,
    )
    prefixes = PrefixCacheDirectory(
        lambda endpoint: open_channel(endpoint, config),
        basis.prefix_hash_key,
        compute_s_per_token=queue.compute_s_per_token,
        dials=dials,
    )
    return _Fleet(admission, workers, pairing, queue, prefixes, load)


def _build_records(basis: _Basis, fleet: _Fleet) -> _Records:
    config, telemetry = basis.config, basis.telemetry
    metrics = RouterMetrics(
        telemetry.metrics, fleet.queue, fleet.admission, fleet.prefixes, fleet.workers
    )
    traces = TraceStore(TraceLimits(config.trace_count), metrics.count_dropped_spans)
    clocks = WorkerClocks()
    tracer = StoringTracer(
        telemetry,
        traces,
        slow_s=config.slow_trace_s,
        on_latency=metrics.count_latency,
        on_regret=metrics.count_regret,
    )
    return _Records(metrics, traces, clocks, tracer)


def _build_requests(
    basis: _Basis, fleet: _Fleet, records: _Records, placement: Placement
) -> _Requests:
    config, metrics, workers = basis.config, records.metrics, fleet.workers
    refusal = _build_early_refusal(basis, fleet, records)
    dispatcher = RequestDispatcher(
        workers=workers,
        queue=fleet.queue,
        placement=placement,
        prefixes=fleet.prefixes,
        policy=basis.policy,
        ticket_key_id=basis.ticket_key.public.key_id,
        migration_wait_s=config.worker_wait_s,
        on_migration=metrics.count_migration,
        clocks=records.clocks,
        check_placed=refusal.check_placed,
    )
    salts = CacheSalts(by_tenant=config.separates_tenants, prefix_hash_key=basis.prefix_hash_key)
    preparer = RequestPreparer(basis.codecs, workers, salts.salt_of)
    callers = CallerBounds(config.calls_per_caller_max, metrics.count_refused)
    runner = RequestRunner(
        callers=callers,
        admission=fleet.admission,
        policy=lambda: basis.policy.policy,
        preparer=preparer,
        dispatcher=dispatcher,
        tracer=records.tracer,
        traits=RunnerTraits(
            drain_error=_draining,
            check_arrival=refusal.check_arrival,
            load=fleet.load,
            paced=True,
        ),
        counter=metrics,
    )

    def max_model_len() -> dict[str, int]:
        live = workers.max_model_len()
        return {name: live.get(name) or one.max_model_len for name, one in basis.codecs.items()}

    tenants = load_tenants(config.api_keys_file)
    images = any(codec.images is not None for codec in basis.codecs.values())
    return _Requests(
        tenants=tenants,
        callers=callers,
        size=RequestSizeCheck(max_model_len, images=images),
        bytes_max=request_bytes_max(
            (one.max_model_len for one in basis.codecs.values()), images=images
        ),
        preparer=preparer,
        dispatcher=dispatcher,
        runner=runner,
        models=ModelCatalog(basis.codecs, workers, fleet.queue),
        conversations=new_conversation_store(config, basis.other_routers.find),
        keep=PromiseKeeper(workers).keep,
    )


def _draining() -> Draining:
    return Draining("the router is shutting down; use another router, or retry in a moment")


def _build_early_refusal(basis: _Basis, fleet: _Fleet, records: _Records) -> EarlyRefusal:
    return EarlyRefusal(
        queue=fleet.queue,
        workers=fleet.workers,
        prefixes=fleet.prefixes,
        policy=basis.policy,
        by_deadline=basis.config.early_refusal,
        on_prediction=records.metrics.record_prediction,
        on_refusal=records.metrics.count_early_refusal,
    )


def _build_services(
    basis: _Basis, fleet: _Fleet, records: _Records, requests: _Requests
) -> RouterServices:
    deadline_s = basis.config.default_deadline_s
    inference = InferenceService(
        models=requests.models,
        prefixes=fleet.prefixes,
        tenants=requests.tenants,
        runner=requests.runner,
        preparer=requests.preparer,
        dispatcher=requests.dispatcher,
        tracer=records.tracer,
        conversations=requests.conversations,
        keep=requests.keep,
        default_deadline_s=deadline_s,
        endpoints={
            "registry_endpoint": basis.config.registry,
            "status_endpoint": basis.config.status_listen,
        },
    )
    own_prompts = OwnPrompts(
        workers=fleet.workers,
        queue=fleet.queue,
        dispatcher=requests.dispatcher,
        policy=basis.policy,
        codecs=basis.codecs,
        start_trace=records.traces.start_trace,
        clocks=records.clocks,
        default_deadline_s=deadline_s,
    )
    return RouterServices(
        inference=inference,
        queue=QueueService(fleet.queue, own_prompts, requests.runner.reject_when_draining),
        load=LoadReader(basis.codecs, fleet.queue, fleet.admission, records.metrics.totals),
        traces=records.traces,
        adapters=basis.adapters,
        conversations=requests.conversations,
        callers=requests.callers,
        tenants=requests.tenants,
        gate=ClientGate(requests.tenants, records.metrics, requests.size),
        bytes_max=requests.bytes_max,
    )


def _build_openai(basis: _Basis, records: _Records, requests: _Requests) -> OpenAiApp:
    config = basis.config
    parts = OpenAiParts(
        codecs=basis.codecs,
        parsers={name: ModelParsers(*names) for name, names in config.parsers.items()},
        models=requests.models,
        tenants=requests.tenants,
        runner=requests.runner,
        preparer=requests.preparer,
        size=requests.size,
        count_failures=records.metrics.count_failures,
        callers=requests.callers,
        conversations=requests.conversations,
        keep=requests.keep,
        images=ImageFetcher(config.image_hosts),
        rejects_unknown_fields=config.reject_unknown_fields,
    )
    readers = load_tenants(config.metrics_keys_file, "metrics_keys_file")
    return OpenAiApp(
        parts,
        MetricsPage(readers, basis.telemetry.metrics.text, config.http_listen),
        deadline_s=config.default_deadline_s,
        body_bytes_max=requests.bytes_max,
    )


def _build_picker(
    basis: _Basis, fleet: _Fleet, records: _Records, requests: _Requests
) -> EndpointPicker:
    return EndpointPicker(
        tenants=requests.tenants,
        runner=requests.runner,
        preparer=requests.preparer,
        size=requests.size,
        dispatcher=requests.dispatcher,
        workers=fleet.workers,
        queue=fleet.queue,
        tracer=records.tracer,
        count_pick=records.metrics.count_pick,
        deadline_s=min(_PICK_S, basis.config.default_deadline_s),
        body_bytes_max=requests.bytes_max,
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
