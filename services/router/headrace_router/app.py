"""A router: all of its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import grpc.aio

from headrace.kv.v1 import handoff_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.access.authorizer import Authorizer
from headrace_common.access.roles import STATUS_AUDIENCE
from headrace_common.errors import Draining
from headrace_common.latency.breakdown import Breakdown
from headrace_common.process.events import EVENTS, EventRing
from headrace_common.process.pacing import LoopLoad
from headrace_common.rpc.channel import open_channel
from headrace_common.tasks import end_task, run_forever
from headrace_common.telemetry.setup import Telemetry
from headrace_common.tickets import SigningKey, sign_handoff
from headrace_frontend.openai.app import MetricsPage, OpenAiApp
from headrace_frontend.openai.batches.batches import Batches
from headrace_frontend.openai.batches.folder import BatchFolder
from headrace_frontend.openai.intake import ClientParts
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.running.record import RequestRecord
from headrace_frontend.running.tracer import RequestTracer
from headrace_frontend.tenants import load_tenants
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.fetch_rule import FetchRule
from headrace_router.adapters import AdapterChanges, ListMembers, no_registry
from headrace_router.config import RouterConfig
from headrace_router.dispatch.dispatcher import PolicySource, RequestDispatcher
from headrace_router.dispatch.moves import Moves
from headrace_router.dispatch.own_prompts import OwnPrompts
from headrace_router.dispatch.prefix_fetch import PrefixFetches
from headrace_router.early_refusal import EarlyRefusal
from headrace_router.incident.recording import CHECKPOINT_S, Recorder
from headrace_router.load import LoadReader, LoadRecorder
from headrace_router.metrics import RouterMetrics
from headrace_router.picker.picker import EndpointPicker
from headrace_router.placement import Placement
from headrace_router.prefill_queue.pairs import Pairing, PairReporter
from headrace_router.prefill_queue.service import QueueService
from headrace_router.prefill_queue.task import SignTask
from headrace_router.prefix_cache.directory import PrefixCacheDirectory
from headrace_router.rpc_services import RouterServices
from headrace_router.service import InferenceService, ModelCatalog, PromiseKeeper
from headrace_router.status.app import StatusApp
from headrace_router.status.reader import StatusReader
from headrace_router.store import OtherRouters
from headrace_router.tracing.attempt_record import WorkerClocks, regret_of
from headrace_router.tracing.store import TraceLimits, TraceStore
from headrace_router.usage import UsageBook
from headrace_router.workers.dials import Dials
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import DecodeSlots
from headrace_text.codec import TextCodec

# Gateways wait about a second for a decision by default.
_PICK_S = 10.0
TRACE_COUNT = 1_024
"""Requests that have their traces stored."""


class Router:
    """The parts of one router. `update` must be called with every change of the registry's members."""

    def __init__(
        self,
        config: RouterConfig,
        codecs: Mapping[str, TextCodec],
        telemetry: Telemetry,
        policy: PolicySource,
        prefix_hash_key: Callable[[], int],
        ticket_key: SigningKey,
        placement: Placement | None = None,
        list_members: ListMembers = no_registry,
        events: EventRing = EVENTS,
    ) -> None:
        """Builds the parts, on the event loop that will own them. The default placement is KvAware.

        `prefix_hash_key` returns the deployment's key, or 0 while it is unknown. `ticket_key` is the router's own.
        `list_members` asks the registry. `events` stores the decisions.
        """
        self._config, self._codecs, self._policy = config, codecs, policy
        folder = None
        if config.batch_folder:
            folder = BatchFolder(Path(config.batch_folder), config.batch_mib * 1024**2)
        load = LoopLoad()
        self._pairing = Pairing(policy)
        # Each request has one prompt in the queue at most.
        recorder = self._incident = Recorder(events, policy)
        self.queue = recorder.queue(
            config.max_concurrent_requests, sign=_task_signer(ticket_key), pairs=self._pairing
        )
        dials = Dials()
        self.workers = WorkerDirectory(
            self._open_channel,
            ticket_key.public.public_key,
            config.worker_wait_s,
            self._resize_slots,
            dials,
            load,
            lambda: policy().worker_roles,
            recorder.table,
            self._worker_leaves,
        )
        self.prefixes = PrefixCacheDirectory(
            self._open_channel,
            prefix_hash_key,
            compute_s_per_token=self.queue.compute_s_per_token,
            dials=dials,
        )
        others = OtherRouters(self._open_channel)
        self.parts = ClientParts(
            config,
            codecs,
            self.workers,
            ModelCatalog(codecs, self.workers, self.queue),
            keep=PromiseKeeper(self.workers).keep,
            policy=policy,
            prefix_hash_key=prefix_hash_key,
            count_refused=lambda refusal, count: self.metrics.count_refused(count, refusal),
            ask_elsewhere=others.ask,
            watched=recorder.pool,
        )
        self.admission = self.parts.admission
        self.metrics = RouterMetrics(
            telemetry.metrics, self.queue, self.admission, self.prefixes, self.workers, codecs
        )
        self.traces = TraceStore(TraceLimits(TRACE_COUNT), self.metrics.count_dropped_spans)
        self._usage = UsageBook(telemetry.metrics)
        self._recorder = LoadRecorder()
        self._clocks = WorkerClocks()
        self._tracer = RequestTracer(
            telemetry,
            slow_s=config.slow_trace_s,
            on_start=self._request_started,
            on_answer=self._request_answered,
            on_end=self._request_ended,
        )
        refusal = EarlyRefusal(
            queue=self.queue,
            workers=self.workers,
            prefixes=self.prefixes.cached,
            policy=policy,
            by_deadline=config.early_refusal,
            on_prediction=self.metrics.record_prediction,
            on_refusal=self.metrics.count_early_refusal,
        )
        sign = _task_signer(ticket_key)
        self.fetches = PrefixFetches(
            *(self.workers, self.prefixes.cached, ticket_key.public.key_id, sign),
            *(self.metrics.prefix_fetched, FetchRule(config.prefix_fetch_gain)),
        )
        self._dispatcher = RequestDispatcher(
            workers=self.workers,
            queue=self.queue,
            placement=placement or recorder.placement(),
            prefixes=self.prefixes.cached,
            policy=policy,
            ticket_key_id=ticket_key.public.key_id,
            migration_wait_s=config.worker_wait_s,
            on_migration=self.metrics.count_migration,
            clocks=self._clocks,
            fetches=self.fetches,
            check_placed=refusal.check_placed,
        )
        self.moves = Moves(self._dispatcher, sign, self.metrics.count_move)
        runner = self.parts.new_runner(
            dispatch=self._dispatcher.run,
            tracer=self._tracer,
            drain_error=_draining,
            check_arrival=refusal.check_arrival,
            load=load,
            paced=True,
            counter=self.metrics,
        )
        self.runner = self.parts.run_by(runner)
        adapters = AdapterChanges(list_members, self._open_channel, codecs, self.workers.table)
        self._batches = None if folder is None else Batches(self.parts, folder)
        self.services = self._new_services(adapters)
        readers = load_tenants(config.metrics_keys_file, "metrics_keys_file")
        page = MetricsPage(readers, telemetry.metrics.text, config.http_listen)
        self.openai = OpenAiApp(self.parts, page, self._batches)
        self.picker = EndpointPicker(
            parts=self.parts,
            dispatcher=self._dispatcher,
            workers=self.workers,
            queue=self.queue,
            tracer=self._tracer,
            count_pick=self.metrics.count_pick,
            deadline_s=min(_PICK_S, config.default_deadline_s),
        )
        status = StatusReader(
            workers=self.workers,
            queue=self.queue,
            admission=self.admission,
            policy=policy,
            traces=self.traces,
            traffic=self.metrics.traffic,
            router_id=config.router_id or config.listen,
        )
        self.status: StatusApp | None = None
        """None without the setting status_listen."""
        if config.status_listen:
            self.status = StatusApp(
                status, Authorizer.from_config(config, [STATUS_AUDIENCE]), adapters
            )
        self._followers: tuple[Callable[[Collection[registry_pb2.Member]], None], ...] = (
            recorder.update,
            self.workers.update,
            self.queue.workers.update,
            lambda _: self.queue.restrict(self.workers.decode_only),
            self.prefixes.update,
            self._pairing.update,
            PairReporter().update,
            status.update,
            others.update,
        )
        self._checkpoints = run_forever(self._store_checkpoints, "checkpoints of events")
        self._balancing = run_forever(self.moves.balance, "moves that the load asks for")

    async def _store_checkpoints(self) -> None:
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            self._incident.checkpoint()

    def update(self, members: Collection[registry_pb2.Member]) -> None:
        """Replaces the members that the registry lists."""
        for follow in self._followers:
            follow(members)

    def drain(self) -> None:
        """Rejects new requests from now on, and ends the records of the load."""
        self.runner.drain()
        self._recorder.end()

    async def close(self) -> None:
        """Ends every stream to workers."""
        await end_task(self._checkpoints)
        await end_task(self._balancing)
        if self._batches is not None:
            await self._batches.close()
        self.parts.close()
        await self.metrics.close()
        await self.prefixes.close()
        await self.workers.close()

    def _request_started(self, record: RequestRecord) -> None:
        if record.stored:
            self.traces.start_trace(record.trace_id, record.request_id, record.arrival_unix_ns)

    def _request_answered(
        self, record: RequestRecord, response: ResponseStream, breakdown: Breakdown
    ) -> None:
        self.metrics.count_latency(response, breakdown)
        self._recorder.add(record, response)

    def _request_ended(self, record: RequestRecord, kept: bool) -> None:
        regret = regret_of(record)
        if regret is not None:
            self.metrics.count_regret(regret)
        self._usage.add(record)
        if record.stored:
            self.traces.end_request(record)
            if kept:
                self.traces.keep(record.trace_id)

    def _open_channel(self, endpoint: str) -> grpc.aio.Channel:
        return open_channel(endpoint, self._config)

    def _resize_slots(self, model: str, slots: DecodeSlots) -> None:
        # Requests for other models are rejected.
        if model in self._codecs:
            self.admission.resize_slots(model, slots.available())

    def _worker_leaves(self, worker: WorkerRef) -> None:
        self.moves.worker_leaves(worker)

    def _new_services(self, adapters: AdapterChanges) -> RouterServices:
        config = self._config
        inference = InferenceService(
            parts=self.parts,
            prefixes=self.prefixes,
            dispatcher=self._dispatcher,
            moves=self.moves,
            tracer=self._tracer,
            endpoints={
                "registry_endpoint": config.registry,
                "status_endpoint": config.status_listen,
            },
        )
        own_prompts = OwnPrompts(
            workers=self.workers,
            queue=self.queue,
            dispatcher=self._dispatcher,
            policy=self._policy,
            codecs=self._codecs,
            start_trace=self.traces.start_trace,
            clocks=self._clocks,
            default_deadline_s=config.default_deadline_s,
        )
        return RouterServices(
            inference=inference,
            queue=QueueService(self.queue, own_prompts.hand_over, self.runner.reject_when_draining),
            load=LoadReader(
                self._codecs,
                self.queue,
                self.runner,
                self.metrics.answered,
                self._recorder,
                self._usage.since,
            ),
            traces=self.traces,
            adapters=adapters,
            parts=self.parts,
            batches=self._batches,
        )


def _draining() -> Draining:
    return Draining("the router is shutting down; use another router, or retry in a moment")


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
