"""Runs requests of clients, for every listener that accepts them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import CallerBounds
from headrace_common.deadlines import Deadline
from headrace_common.errors import Draining
from headrace_common.process.pacing import LoopLoad
from headrace_router.admission.admission import Admission, AdmissionPermit
from headrace_router.dispatch.completion import finish_reason_name
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.metrics import RouterMetrics
from headrace_router.request.preparation import RequestPreparer
from headrace_router.request.request import RoutedRequest
from headrace_router.request.response_stream import ResponseStream, TextOutlet
from headrace_router.request.validation import REQUEST_ID_CHARACTERS_MAX
from headrace_router.tracing.request_span import RequestTracer, trace_id_of

ResponseWriter: TypeAlias = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]
"""Sends one message to the client. It returns when the client can take another."""


class RequestRunner:
    """Admits, prepares and dispatches requests, and writes their responses."""

    def __init__(
        self,
        *,
        callers: CallerBounds,
        admission: Admission,
        preparer: RequestPreparer,
        dispatcher: RequestDispatcher,
        tracer: RequestTracer,
        metrics: RouterMetrics,
    ) -> None:
        self._callers = callers
        self._admission = admission
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._tracer = tracer
        self._metrics = metrics
        self._load = LoopLoad()
        self._draining = False

    @property
    def draining(self) -> bool:
        """Whether new requests are rejected."""
        return self._draining

    def drain(self) -> None:
        """Rejects new requests from now on. Requests in flight continue."""
        self._draining = True

    def reject_when_draining(self) -> None:
        """Raises Draining after `drain`."""
        if self._draining:
            raise Draining("the router is shutting down; use another router, or retry in a moment")

    async def run(
        self,
        request: inference_pb2.GenerateRequest,
        tenant: str,
        deadline: Deadline,
        write: ResponseWriter,
        outlet: TextOutlet | None = None,
    ) -> None:
        """Writes the response to `request`, message by message. Cancellation ends all work for the request.

        `outlet` may get the text of some messages instead of `write`, between the first and the last message. Raises
        HeadraceError, before or between messages.
        """
        arrival_unix_ns = time.time_ns()
        with self._metrics.count_failures():
            permit = await self.admit(tenant, deadline)
            with self._admission.holding(permit):
                response = await self._run_admitted(
                    request, (write, outlet), permit, deadline, arrival_unix_ns
                )
        self._metrics.count_request(
            finish_reason_name(response.finish_reason),
            (response.first_token_unix_ns - arrival_unix_ns) / 1e6 if response.started else None,
        )

    @asynccontextmanager
    async def admitted(self, tenant: str, deadline: Deadline) -> AsyncIterator[None]:
        """A place over the block, for work that is not a request, such as tokenizing. Raises as `admit` does."""
        with self._metrics.count_failures():
            permit = await self.admit(tenant, deadline)
            with self._admission.holding(permit):
                yield

    async def admit(self, tenant: str, deadline: Deadline) -> AdmissionPermit:
        """A place for one request. Raises Draining, QueueFull or DeadlineExceeded, before any work is done."""
        self.reject_when_draining()
        return await self._admission.admit(tenant, deadline)

    async def wait_turn(self) -> None:
        """Waits until this request's caller may have it routed."""
        await self._callers.wait_turn()

    async def _run_admitted(
        self,
        request: inference_pb2.GenerateRequest,
        writers: tuple[ResponseWriter, TextOutlet | None],
        permit: AdmissionPermit,
        deadline: Deadline,
        arrival_unix_ns: int,
    ) -> ResponseStream:
        request_id = request_id_of(request)
        with self._tracer.request_span(request_id, arrival_unix_ns) as root:
            prepared = await self._preparer.prepare(
                request, request_id, root, deadline, permit.tenant
            )
            await permit.acquire_tokens(len(prepared.token_ids))
            await permit.acquire_slot(prepared.model)
            await self.wait_turn()
            response = ResponseStream(prepared, trace_id_of(root), self._load)
            routed = RoutedRequest(
                *(prepared, response, root, deadline, arrival_unix_ns, permit.tenant),
                slot_wait_s=lambda: permit.slot_wait_s,
            )
            write, outlet = writers
            if outlet is not None:
                response.use_outlet(outlet)
            await self._stream(routed, write, permit)
            return response

    async def _stream(
        self, request: RoutedRequest, write: ResponseWriter, permit: AdmissionPermit
    ) -> None:
        """Runs the request and writes its response to the client."""
        response = request.response

        async def produce() -> None:
            try:
                await self._dispatcher.run(request)
            # `next_message` raises it again.
            except Exception as error:  # noqa: BLE001
                response.fail(error)

        producer = asyncio.create_task(produce())
        try:
            while (message := await response.next_message()) is not None:
                permit.release_tokens()
                await write(message)
        finally:
            producer.cancel()
            await asyncio.wait({producer})


def request_id_of(request: inference_pb2.GenerateRequest) -> str:
    """The client's id, cut to the size limit: a rejected request can be found by it, too. Else a new one."""
    return request.request_id[:REQUEST_ID_CHARACTERS_MAX] or f"r{secrets.token_hex(12)}"
