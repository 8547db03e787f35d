"""The gRPC services of a router, on both of its listeners."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import grpc.aio

from headrace.inference.v1 import (
    adapter_service_pb2_grpc,
    conversation_pb2_grpc,
    inference_pb2_grpc,
    load_pb2_grpc,
    trace_pb2_grpc,
)
from headrace.prefill.v1 import prefill_pb2_grpc
from headrace_common.callers.bounds import CallerBounds
from headrace_common.rpc.server import ClientServices, GrpcServer
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.tenants import Tenants, tenant_or_none
from headrace_router.adapters.changes import AdapterChanges
from headrace_router.adapters.service import AdapterServicer
from headrace_router.client_gate import ClientGate
from headrace_router.config import RouterConfig
from headrace_router.conversations import ConversationServicer
from headrace_router.load import LoadReader
from headrace_router.prefill_queue.service import QueueService
from headrace_router.service import InferenceService
from headrace_router.tracing.service import OTLP_SERVICE_NAME, SpanCollector, TraceReader
from headrace_router.tracing.store import TraceStore

CLIENT_SERVICES = ("headrace.inference.v1.InferenceService",)
INTERNAL_SERVICES = (
    *CLIENT_SERVICES,
    "headrace.inference.v1.AdapterService",
    "headrace.inference.v1.ConversationService",
    "headrace.inference.v1.LoadService",
    "headrace.inference.v1.TraceService",
    "headrace.prefill.v1.PrefillQueueService",
    OTLP_SERVICE_NAME,
)


@dataclass(frozen=True, slots=True)
class RouterServices:
    """The gRPC services of a router, and what the listener for clients needs."""

    inference: InferenceService
    queue: QueueService
    load: LoadReader
    traces: TraceStore
    adapters: AdapterChanges
    conversations: ConversationStore
    callers: CallerBounds
    tenants: Tenants
    gate: ClientGate
    bytes_max: int

    def new_server(self, config: RouterConfig) -> GrpcServer:
        """A server with every service of the router. Raises ConfigError."""
        clients = ClientServices(
            names=CLIENT_SERVICES,
            interceptors=[self.gate],
            message_bytes_max=self.bytes_max,
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
        adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server(
            AdapterServicer(self.adapters), server
        )
        conversation_pb2_grpc.add_ConversationServiceServicer_to_server(
            ConversationServicer(self.conversations), server
        )
        load_pb2_grpc.add_LoadServiceServicer_to_server(self.load, server)
        prefill_pb2_grpc.add_PrefillQueueServiceServicer_to_server(self.queue, server)
        SpanCollector(self.traces.add_batch).add_to(server)
