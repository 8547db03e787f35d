"""DecodeService: admits attempts, runs them, and records their traces."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc
import grpc.aio
from opentelemetry import context as otel_context
from opentelemetry.trace import Span

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.worker.v1 import worker_pb2
from headrace_common.access.roles import Role, current_caller
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    Draining,
    HeadraceError,
    InternalError,
    InvalidRequest,
    NotFound,
    StaleIncarnation,
    Unauthenticated,
)
from headrace_common.process.pacing import LoopLoad
from headrace_common.telemetry.schema import SPAN_DECODE
from headrace_common.telemetry.setup import Telemetry
from headrace_common.tickets.direct import check_ticket
from headrace_common.tickets.keys import TicketKey, TicketKeys, unauthenticated
from headrace_decode.admission.admission import Admission, SeenTransfers
from headrace_decode.attempt import Attempt
from headrace_decode.proto import work_from_proto
from headrace_decode.spans import record_attempt, record_transfer, start_attributes
from headrace_engine.interface import Engine
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.receive.receiver import Receiver

log = logging.getLogger(__name__)

# A router's status stream, which brings its key, may reach a new worker after the router's request.
KEY_WAIT_S = 1.0

Context = grpc.aio.ServicerContext[decode_pb2.GenerateRequest, decode_pb2.GenerateResponse]


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Owns the attempts of this worker that have not ended."""

    def __init__(
        self,
        *,
        ref: WorkerRef,
        engine: Engine,
        receiver: Receiver,
        admission: Admission,
        telemetry: Telemetry,
        request_timeout_s: float,
        ticket_keys: TicketKeys,
        on_ticket_refused: Callable[[str], None] = lambda part: None,
    ) -> None:
        self._ref = ref
        self._engine = engine
        self._receiver = receiver
        self._admission = admission
        self._telemetry = telemetry
        self._request_timeout_s = request_timeout_s
        self._ticket_keys = ticket_keys
        self._on_ticket_refused = on_ticket_refused
        self._seen = SeenTransfers()
        self._live: dict[str, Attempt] = {}
        self._awaiting: dict[str, Attempt] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._load = LoopLoad()
        self._draining = False
        self._notice = Deadline.after(0.0)
        self._idle = asyncio.Event()
        self._idle.set()

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        """See decode.proto."""
        try:
            signer = await self._check_permission(request)
        except Unauthenticated as refusal:
            self._on_ticket_refused(refusal.metadata["ticket"])
            raise
        deadline = Deadline.from_context(context, self._request_timeout_s)
        attempt = self._admit(request, deadline, signer)
        span = self._telemetry.tracer.start_span(
            SPAN_DECODE,
            context=otel_context.get_current(),
            start_time=attempt.timestamps.start_unix_ns,
            attributes=start_attributes(request.request_id, attempt.work, self._ref),
        )
        error: HeadraceError | None = Cancelled("the caller cancelled or disconnected")

        # gRPC may drop a suspended generator without closing it, so the end of the RPC counts too.
        def on_rpc_end(context: Context) -> None:
            self._end(attempt, span, error)

        # The stubs' callback type is a plain class, which no function can be.
        context.add_done_callback(on_rpc_end)  # type: ignore[arg-type]
        try:
            on_transfer_free = partial(record_transfer, self._telemetry, span)
            async for response in attempt.responses(on_transfer_free):
                if response.HasField("finished"):
                    # The caller may disconnect as soon as it has read this.
                    error = None
                yield response
        except HeadraceError as failure:
            error = failure
            raise
        except Exception as failure:
            error = InternalError(f"{type(failure).__name__}: {failure}")
            raise
        finally:
            self._end(attempt, span, error)

    async def _check_permission(self, request: decode_pb2.GenerateRequest) -> TicketKey | None:
        """The key that must sign the handoff ticket, None where any router may.

        A request with a ticket may come from every caller, and any router may queue its prompt. Raises Unauthenticated
        for a request that no router permits.
        """
        if request.ticket:
            # A ticket for an older incarnation is reported as such.
            self._check_incarnation(request.incarnation)
            check_ticket(self._ticket_keys.find, request, self._ref.worker_id)
            return None
        if Role.ROUTER not in current_caller().roles:
            raise Unauthenticated(
                f"{self._ref.worker_id} requires a ticket; ask a router, by Generate or by Route",
                metadata={"ticket": "missing"},
            )
        if not request.remote_prefill:
            return None
        signer = await self._ticket_keys.wait_for(request.ticket_key_id, KEY_WAIT_S)
        if signer is None:
            raise unauthenticated(
                "of the handoff would have an unknown key; send the key by WatchStatus and its id as ticket_key_id",
                "key_id",
            )
        return signer

    def _check_incarnation(self, incarnation: str) -> None:
        if incarnation != self._ref.incarnation:
            raise StaleIncarnation(
                f"the request is for incarnation {incarnation or '(none)'} of "
                f"{self._ref.worker_id}, this is {self._ref.incarnation}",
                metadata={"meant": incarnation, "actual": self._ref.incarnation},
            )

    def _admit(
        self,
        request: decode_pb2.GenerateRequest,
        deadline: Deadline,
        signer: TicketKey | None,
    ) -> Attempt:
        """Reserves resources for an attempt, or raises before any are spent."""
        if self._draining and self._notice.expired:
            raise self._refusal()
        self._check_incarnation(request.incarnation)
        work = work_from_proto(request)
        if work.from_logits and not self._engine.logits_bytes:
            what = f"the engine of {self._ref.worker_id} samples no token from logits"
            raise InvalidRequest({"first_token": f"{what}: choose decode or prefill"})
        self._seen.check(work.transfer_id)
        deadline.check("admission")
        self._admission.admit(
            work.transfer_id,
            prompt_tokens=len(work.token_ids),
            max_tokens=work.sampling.max_tokens - work.generated_tokens,
            quarantined_blocks=self._receiver.quarantined_blocks,
            # A continued answer is useful even if it is cut off at the deadline.
            remaining_s=math.inf if work.generated_tokens else deadline.remaining_s(),
        )
        self._seen.remember(work.transfer_id)
        self._idle.clear()
        attempt = Attempt(
            work,
            engine=self._engine,
            receiver=self._receiver,
            deadline=deadline,
            on_closed=lambda: self._attempt_closed(work.transfer_id),
            signer=signer,
            load=self._load,
        )
        self._live[work.transfer_id] = attempt
        if work.awaits_first_token and not work.from_logits:
            self._awaiting[work.transfer_id] = attempt
        return attempt

    async def SetFirstToken(
        self,
        request: decode_pb2.SetFirstTokenRequest,
        context: grpc.aio.ServicerContext[
            decode_pb2.SetFirstTokenRequest, decode_pb2.SetFirstTokenResponse
        ],
    ) -> decode_pb2.SetFirstTokenResponse:
        """See decode.proto."""
        self._check_incarnation(request.incarnation)
        attempt = self._awaiting.get(request.transfer_id)
        if attempt is None:
            raise NotFound(
                f"no request of transfer {request.transfer_id} waits for its first token",
                metadata={"transfer_id": request.transfer_id},
            )
        attempt.set_first_token(request.token_id)
        return decode_pb2.SetFirstTokenResponse()

    def _end(self, attempt: Attempt, span: Span, error: HeadraceError | None) -> None:
        """Starts to give back the attempt's resources. Only the first call counts."""
        if not attempt.end():
            return
        self._awaiting.pop(attempt.work.transfer_id, None)
        if error is None:
            self._record_completion(attempt)
        task = asyncio.get_running_loop().create_task(self._close(attempt, span, error))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _record_completion(self, attempt: Attempt) -> None:
        times, work = attempt.timestamps, attempt.work
        if not attempt.generated_tokens:
            return
        first_ns = times.sampled_unix_ns or times.first_token_unix_ns
        self._admission.answer_completed(
            prompt_tokens=len(work.token_ids),
            max_tokens=work.sampling.max_tokens - work.generated_tokens,
            tokens=attempt.generated_tokens,
            lead_s=(first_ns - times.start_unix_ns) / 1e9,
            stream_s=(times.last_token_unix_ns - first_ns) / 1e9,
        )

    async def _close(self, attempt: Attempt, span: Span, error: HeadraceError | None) -> None:
        try:
            await attempt.close(error)
        except Exception:
            log.exception("closing %s failed", attempt.work.transfer_id)
        finally:
            record_attempt(self._telemetry, span, attempt, error)

    def _attempt_closed(self, transfer_id: str) -> None:
        self._live.pop(transfer_id, None)
        self._admission.release(transfer_id)
        if self._admission.request_count == 0:
            self._idle.set()

    def start_drain(self, notice_s: float = 0.0) -> None:
        """Reports DRAINING in `status` at once, and refuses new attempts after `notice_s`.

        Until then routers may not have read the status.
        """
        self._draining = True
        self._notice = Deadline.after(notice_s)

    async def finish_drain(self, deadline: Deadline) -> None:
        """Returns once no attempt is left and none can start.

        At the deadline, attempts end with Draining, so that their routers continue on other workers.
        """
        await asyncio.sleep(self._notice.remaining_s())
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._idle.wait()
        except TimeoutError:
            log.warning("ending %d requests at the end of the drain", len(self._live))
        for attempt in tuple(self._live.values()):
            attempt.interrupt(self._refusal())
        await self._idle.wait()
        while self._closing:
            await asyncio.wait(set(self._closing))

    def _refusal(self) -> Draining:
        worker_id = self._ref.worker_id
        return Draining(f"{worker_id} is shutting down", metadata={"worker_id": worker_id})

    def status(self) -> worker_pb2.WatchStatusResponse:
        """The state that WatchStatus reports now."""
        usage = self._engine.usage()
        states = worker_pb2.WatchStatusResponse
        return worker_pb2.WatchStatusResponse(
            worker_id=self._ref.worker_id,
            incarnation=self._ref.incarnation,
            state=states.STATE_DRAINING if self._draining else states.STATE_SERVING,
            running_requests=usage.running_requests,
            waiting_requests=usage.waiting_requests,
            total_blocks=self._engine.descriptor.ranks[0].block_count,
            reserved_blocks=self._admission.reserved_blocks,
            quarantined_blocks=self._receiver.quarantined_blocks,
            active_transfers=self._receiver.active_count,
            used_blocks=usage.used_blocks,
            distrusted_workers=[
                worker_pb2.DistrustedWorker(worker_id=one.worker_id, incarnation=one.incarnation)
                for one in self._receiver.rejected_senders
            ],
        )
