"""The router's parts, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from headrace.inference.v1 import inference_pb2_grpc, trace_pb2_grpc
from headrace.prefill.v1 import prefill_pb2_grpc
from headrace_common.channel import open_channel
from headrace_common.telemetry import Telemetry
from headrace_router.config import RouterConfig
from headrace_router.generate import Generator, PolicySource
from headrace_router.placement import LeastLoaded
from headrace_router.prefill_queue import PrefillQueue
from headrace_router.pull_service import PullService
from headrace_router.service import InferenceService
from headrace_router.text.codec import TextCodec
from headrace_router.trace_service import OTLP_SERVICE_NAME, SpanCollector, TraceReader
from headrace_router.trace_store import StoreExporter, TraceStore
from headrace_router.view import WorkerView

SERVICES = (
    "headrace.inference.v1.InferenceService",
    "headrace.inference.v1.TraceService",
    "headrace.prefill.v1.PrefillQueueService",
    OTLP_SERVICE_NAME,
)


@dataclass(frozen=True, slots=True)
class Router:
    """One router's parts.

    Nothing here talks to the registry: `workers.update` is told of members.
    """

    inference: InferenceService
    workers: WorkerView
    queue: PrefillQueue
    traces: TraceStore

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds every servicer in SERVICES."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference, server)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(TraceReader(self.traces), server)
        prefill_pb2_grpc.add_PrefillQueueServiceServicer_to_server(PullService(self.queue), server)
        add_collector: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add_collector(SpanCollector(self.traces), server)


def assemble(
    config: RouterConfig,
    codecs: Mapping[str, TextCodec],
    telemetry: Telemetry,
    policy: PolicySource,
) -> Router:
    """Builds the parts; must run on the event loop that will own them."""
    store = TraceStore(config.trace_count)
    telemetry.add_exporter(StoreExporter(store))
    workers = WorkerView(lambda endpoint: open_channel(endpoint, config))
    queue = PrefillQueue(config.max_queued_tasks)
    generator = Generator(
        view=workers,
        queue=queue,
        placement=LeastLoaded(),
        policy=policy,
        retry_budget=config.retry_budget,
        telemetry=telemetry,
    )
    inference = InferenceService(
        codecs=codecs,
        view=workers,
        queue=queue,
        generator=generator,
        store=store,
        telemetry=telemetry,
        max_concurrent_requests=config.max_concurrent_requests,
        default_deadline_s=config.default_deadline_s,
    )
    return Router(inference, workers, queue, store)
