"""The front door: InferenceService."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Any

import grpc.aio
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common import telemetry_schema as schema
from headrace_common.deadlines import Deadline
from headrace_common.errors import Draining, HeadraceError, QueueFull
from headrace_common.telemetry import Telemetry
from headrace_router.answer import Answer
from headrace_router.attempt import Job
from headrace_router.generate import Generator
from headrace_router.prefill_queue import PrefillQueue
from headrace_router.text.codec import TextCodec
from headrace_router.trace_store import TraceStore
from headrace_router.validate import REQUEST_ID_CHARACTERS_MAX, PreparedRequest, prepare
from headrace_router.view import WorkerView

# An error that names what was waited for must reach the client before its own clock ends the call.
_DEADLINE_MARGIN_S = 0.2
_DEADLINE_MARGIN_SHARE = 0.1


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Takes requests, and lists the models that can be called."""

    def __init__(
        self,
        *,
        codecs: Mapping[str, TextCodec],
        view: WorkerView,
        queue: PrefillQueue,
        generator: Generator,
        store: TraceStore,
        telemetry: Telemetry,
        max_concurrent_requests: int,
        default_deadline_s: float,
    ) -> None:
        self._codecs = codecs
        self._view = view
        self._queue = queue
        self._generator = generator
        self._store = store
        self._telemetry = telemetry
        self._max_concurrent_requests = max_concurrent_requests
        self._default_deadline_s = default_deadline_s
        self._request_count = 0
        self._draining = False

    def drain(self) -> None:
        """Refuses new requests from now on; those in flight go on."""
        self._draining = True

    async def Generate(  # type: ignore[override]
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Streams one answer. Being cancelled ends everything that was begun for it."""
        arrival_unix_ns = time.time_ns()
        self._admit()
        self._request_count += 1
        request_id = _request_id(request)
        root = self._telemetry.tracer.start_span(
            schema.SPAN_REQUEST,
            start_time=arrival_unix_ns,
            attributes={schema.ATTRIBUTE_REQUEST_ID: request_id},
        )
        self._store.begin(_trace_id(root), request_id, arrival_unix_ns)
        try:
            await self._answer(request, request_id, context, root, arrival_unix_ns)
        except HeadraceError as error:
            root.set_status(Status(StatusCode.ERROR, error.detail))
            root.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)
            raise
        except asyncio.CancelledError:
            root.set_status(Status(StatusCode.ERROR, "the client gave the request up"))
            raise
        finally:
            root.end()
            self._request_count -= 1

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.ListModelsResponse:
        """The models that at least one live decode worker serves, by name."""
        contexts = self._view.context_tokens()
        decode_counts = self._view.decode_worker_counts()
        prefill_counts = self._queue.puller_counts()
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    name=name,
                    context_tokens=contexts[name],
                    prefill_worker_count=prefill_counts.get(name, 0),
                    decode_worker_count=decode_counts[name],
                )
                for name in sorted(self._codecs)
                if name in decode_counts
            ]
        )

    def _admit(self) -> None:
        if self._draining:
            raise Draining("the router is shutting down; ask another one, or again in a moment")
        if self._request_count >= self._max_concurrent_requests:
            raise QueueFull(
                f"{self._max_concurrent_requests} requests are in flight already",
                metadata={"queue": "requests", "maxsize": str(self._max_concurrent_requests)},
            )

    async def _answer(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        context: grpc.aio.ServicerContext[Any, Any],
        root: Span,
        arrival_unix_ns: int,
    ) -> None:
        deadline = _deadline_of(context, self._default_deadline_s)
        prepared = await self._prepare(request, request_id, root)
        answer = Answer(prepared, _trace_id(root))
        job = Job(prepared, answer, root, deadline, arrival_unix_ns)

        async def produce() -> None:
            try:
                await self._generator.run(job)
            # Whatever it is, it is raised again where the answer is taken.
            except Exception as error:  # noqa: BLE001
                answer.fail(error)

        producer = asyncio.create_task(produce())
        try:
            while (response := await answer.take()) is not None:
                await context.write(response)
        finally:
            producer.cancel()
            await asyncio.wait({producer})

    async def _prepare(
        self, request: inference_pb2.GenerateRequest, request_id: str, root: Span
    ) -> PreparedRequest:
        start_unix_ns = time.time_ns()
        problem = ""
        try:
            prepared = await asyncio.to_thread(
                prepare,
                request,
                request_id=request_id,
                codecs=self._codecs,
                context_tokens=self._view.context_tokens(),
            )
        except HeadraceError as error:
            problem = error.detail
            raise
        finally:
            self._telemetry.record_span(
                schema.SPAN_TOKENIZE,
                trace.set_span_in_context(root),
                start_unix_ns,
                time.time_ns(),
                error=problem,
            )
        root.set_attribute(schema.ATTRIBUTE_MODEL, prepared.model)
        root.set_attribute(schema.ATTRIBUTE_PROMPT_TOKENS, len(prepared.token_ids))
        return prepared


def _request_id(request: inference_pb2.GenerateRequest) -> str:
    """The client's own, cut to the size allowed, so that a refused request can be found by it too."""
    return request.request_id[:REQUEST_ID_CHARACTERS_MAX] or f"r{secrets.token_hex(12)}"


def _trace_id(span: Span) -> str:
    return trace.format_trace_id(span.get_span_context().trace_id)


def _deadline_of(context: grpc.aio.ServicerContext[Any, Any], default_s: float) -> Deadline:
    remaining_s = Deadline.from_context(context, default_s).remaining_s()
    margin_s = min(_DEADLINE_MARGIN_S, _DEADLINE_MARGIN_SHARE * remaining_s)
    return Deadline.after(remaining_s - margin_s)
