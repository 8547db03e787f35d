"""The gRPC services of a router, on both of its listeners."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

import grpc.aio
from google.protobuf.descriptor import Descriptor

from headrace.inference.v1 import (
    adapter_service_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    load_pb2_grpc,
    store_pb2_grpc,
    trace_pb2_grpc,
)
from headrace.prefill.v1 import prefill_pb2_grpc
from headrace_common.limits import REQUEST_FIELDS_MAX
from headrace_common.rpc.handlers import GateInterceptor, Metadata
from headrace_common.rpc.server import ClientServices, GrpcServer
from headrace_common.rpc.wire_fields import MalformedMessage, fields_of, require_few_fields
from headrace_frontend.openai.batches.batches import Batches
from headrace_frontend.openai.intake import ClientParts
from headrace_frontend.tenants import tenant_or_none
from headrace_router.adapters import AdapterChanges, AdapterServicer
from headrace_router.config import RouterConfig
from headrace_router.load import LoadReader
from headrace_router.prefill_queue.service import QueueService
from headrace_router.service import InferenceService
from headrace_router.store import StoreServicer
from headrace_router.tracing.service import OTLP_SERVICE_NAME, SpanCollector, TraceReader
from headrace_router.tracing.store import TraceStore

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_REQUEST_TYPES: Mapping[str, Descriptor] = {
    f"/{_SERVICE.full_name}/{method.name}": method.input_type for method in _SERVICE.methods
}
_TEXT = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["text"].number
_GENERATE = f"/{_SERVICE.full_name}/Generate"
_LIST_MODELS = f"/{_SERVICE.full_name}/ListModels"
# Protobuf parses a message of this size in half a millisecond, whatever it contains.
_UNCOUNTED_BYTES = 64 * 1024
# A client that sends its text behind more fields than these has it checked once it is parsed.
_FIELDS_SEARCHED = 64


def _text_bytes(data: bytes, request_type: Descriptor) -> int:
    """Bytes of the longest text in a serialized request. 0 where there is none in the first fields.

    Parsing and converting a text of some MiB would take milliseconds of the event loop.
    """
    if request_type is not inference_pb2.GenerateRequest.DESCRIPTOR:
        return 0
    with suppress(MalformedMessage):
        return max(
            (
                end - start
                for number, start, end in islice(fields_of(data, 0, len(data)), _FIELDS_SEARCHED)
                if number == _TEXT and start is not None
            ),
            default=0,
        )
    return 0


class ClientGate(GateInterceptor):
    """Guards the InferenceService."""

    def __init__(self, parts: ClientParts) -> None:
        super().__init__()
        self._parts = parts

    def check_call(self, method: str, metadata: Metadata) -> None:
        if method == _GENERATE:
            with self._parts.runner.counter.count_failures():
                self._parts.tenants.tenant_of(metadata)
        elif method == _LIST_MODELS:
            self._parts.tenants.tenant_of(metadata)

    def check_request(self, method: str, data: bytes) -> None:
        request_type = _REQUEST_TYPES.get(method)
        if request_type is None:
            return
        self._parts.size.check(len(data))
        if len(data) > _UNCOUNTED_BYTES:
            require_few_fields(data, request_type, REQUEST_FIELDS_MAX)
            self._parts.size.check_text(_text_bytes(data, request_type))


CLIENT_SERVICES = ("headrace.inference.v1.InferenceService",)
INTERNAL_SERVICES = (
    *CLIENT_SERVICES,
    "headrace.inference.v1.AdapterService",
    "headrace.inference.v1.LoadService",
    "headrace.inference.v1.StoreService",
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
    parts: ClientParts
    batches: Batches | None

    def new_server(self, config: RouterConfig) -> GrpcServer:
        """A server with every service of the router. Raises ConfigError."""
        clients = ClientServices(
            names=CLIENT_SERVICES,
            interceptors=[ClientGate(self.parts)],
            message_bytes_max=self.parts.body_bytes_max,
            callers=self.parts.callers,
            tenant_of=partial(tenant_or_none, self.parts.tenants),
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
        store_pb2_grpc.add_StoreServiceServicer_to_server(
            StoreServicer(self.parts.objects, self.batches), server
        )
        load_pb2_grpc.add_LoadServiceServicer_to_server(self.load, server)
        prefill_pb2_grpc.add_PrefillQueueServiceServicer_to_server(self.queue, server)
        SpanCollector(self.traces.add_batch).add_to(server)
