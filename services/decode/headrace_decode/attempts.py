"""Admits attempts, and owns those that have not ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import keep_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    DeadlineExceeded,
    Draining,
    HeadraceError,
    InvalidRequest,
    NotFound,
    StaleIncarnation,
)
from headrace_common.logs import TRACE_NAMES
from headrace_common.tasks import BackgroundTasks
from headrace_common.telemetry.schema import SPAN_DECODE
from headrace_common.telemetry.setup import Telemetry
from headrace_common.tickets import TicketKey, TicketKeys, unauthenticated
from headrace_decode.admission import BlockAdmission, SeenTransfers
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.proto import keep_terms, kept_to_proto, work_from_proto
from headrace_decode.spans import record_attempt, record_transfer, start_attributes
from headrace_decode.timestamps import RequestTimestamps
from headrace_engine.interface import Engine
from headrace_engine.proto import require_vocabulary
from headrace_kv.layout import WorkerRef
from headrace_kv.receive.receiver import Receiver

log = logging.getLogger(__name__)

# A router's status stream, which brings its key, may reach a new worker after the router's request.
KEY_WAIT_S = 1.0


class Attempts:
    """The attempts of this worker, of routers and of its own clients."""

    def __init__(
        self,
        *,
        ref: WorkerRef,
        engine: Engine,
        receiver: Receiver,
        admission: BlockAdmission,
        telemetry: Telemetry,
        ticket_keys: TicketKeys,
    ) -> None:
        self._ref = ref
        self._engine = engine
        self._receiver = receiver
        self._admission = admission
        self._telemetry = telemetry
        self._ticket_keys = ticket_keys
        self._seen = SeenTransfers()
        self._live: dict[str, DecodeAttempt] = {}
        self._awaiting: dict[str, DecodeAttempt] = {}
        self._closing = BackgroundTasks("the end of an attempt")
        self._on_room: Callable[[], None] = lambda: None
        self._on_arrived: Callable[[DecodeAttempt], None] = lambda attempt: None
        self._on_closed: Callable[[DecodeAttempt], None] = lambda attempt: None
        self.draining = False
        """Whether new attempts are refused, or will be soon."""
        self._notice = Deadline.after(0.0)
        self._idle = asyncio.Event()
        self._idle.set()

    def find(self, transfer_id: str) -> DecodeAttempt | None:
        """The attempt of a transfer, until it has given back its resources."""
        return self._live.get(transfer_id)

    def notify_room(self, on_room: Callable[[], None]) -> None:
        """From now on calls `on_room` whenever an attempt has given back its slot and blocks."""
        self._on_room = on_room

    def notify(
        self,
        on_arrived: Callable[[DecodeAttempt], None],
        on_closed: Callable[[DecodeAttempt], None],
    ) -> None:
        """From now on calls `on_arrived` with every attempt that has its KV.

        Calls `on_closed` with every one that has given back its resources.
        """
        self._on_arrived, self._on_closed = on_arrived, on_closed

    @property
    def idle(self) -> bool:
        """Whether no attempt is left."""
        return self._idle.is_set()

    async def start(self, request: decode_pb2.GenerateRequest, deadline: Deadline) -> DecodeAttempt:
        """Admits an attempt of a router, in the current trace. The caller must end it.

        Raises before any resources are spent.
        """
        return self.admit(request, deadline, await self._signer_of(request))

    async def _signer_of(self, request: decode_pb2.GenerateRequest) -> TicketKey | None:
        """The key that must sign the handoff ticket. None without a handoff. Raises Unauthenticated without the key."""
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

    def admit(
        self,
        request: decode_pb2.GenerateRequest,
        deadline: Deadline,
        signer: TicketKey | None = None,
    ) -> DecodeAttempt:
        """As `start`. Without a signer, any router may queue the prompt, as for this worker's own clients."""
        if self.draining and self._notice.expired:
            raise self.refusal()
        self._check_incarnation(request.incarnation)
        work = work_from_proto(request, self._engine.adapters)
        if work.from_hidden_state and not self._engine.hidden_format:
            what = f"the engine of {self._ref.worker_id} samples no token from hidden states"
            raise InvalidRequest({"first_token": f"{what}: choose decode or prefill"})
        require_vocabulary(work.token_ids, work.images, self._engine.vocabulary_size)
        if work.computes_from and not self._computes_beside(work.computes_from):
            work = replace(work, computes_from=0)
        self._seen.check(work.transfer_id)
        deadline.check("admission")
        self._admission.admit(
            work.transfer_id,
            prompt_tokens=len(work.token_ids),
            max_tokens=work.sampling.max_tokens - work.generated_tokens,
            quarantined_blocks=self._receiver.quarantined_blocks,
        )
        self._seen.remember(work.transfer_id)
        self._idle.clear()
        timestamps = RequestTimestamps()
        span = self._telemetry.start_span(
            SPAN_DECODE,
            start_unix_ns=timestamps.start.unix_ns,
            attributes=start_attributes(request.request_id, work, self._ref),
        )
        for name in (request.request_id, work.transfer_id):
            TRACE_NAMES.add(name, span.get_span_context())
        attempt = DecodeAttempt(
            work,
            engine=self._engine,
            receiver=self._receiver,
            deadline=deadline,
            timestamps=timestamps,
            span=span,
            on_transfer_free=partial(record_transfer, self._telemetry, span),
            on_arrived=self._on_arrived,
            on_end=self._end,
            signer=signer,
        )
        self._live[work.transfer_id] = attempt
        if work.awaits_first_token and not work.from_hidden_state:
            self._awaiting[work.transfer_id] = attempt
        return attempt

    def _computes_beside(self, token: int) -> bool:
        """Whether an attempt can compute from this token on while KV of those before it arrives."""
        groups = self._engine.descriptor.layout.groups
        aligned = not any(token % group.block_tokens for group in groups if group.block_tokens)
        return aligned and self._engine.computes_beside and self._receiver.lands_layers

    def set_first_token(self, request: decode_pb2.SetFirstTokenRequest) -> None:
        """Gives a waiting attempt its first token. See decode.proto for the errors."""
        self._check_incarnation(request.incarnation)
        attempt = self._awaiting.get(request.transfer_id)
        if attempt is None:
            raise NotFound(
                f"no request of transfer {request.transfer_id} waits for its first token",
                metadata={"transfer_id": request.transfer_id},
            )
        attempt.set_first_token(request.token_id)

    async def keep(
        self, request: decode_pb2.KeepRequest, deadline: Deadline
    ) -> decode_pb2.KeepResponse:
        """Renews or ends a promise. See decode.proto for the errors."""
        self._check_incarnation(request.incarnation)
        terms = keep_terms(request)
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                kept = await self._engine.keep(terms)
        except TimeoutError:
            raise DeadlineExceeded("the engine did not answer in time") from None
        if kept is None:
            raise NotFound("no such promise: it has ended, its KV was lost, or it is another's")
        return decode_pb2.KeepResponse(
            kept=kept_to_proto(kept) if kept.tokens else keep_pb2.Kept(reason="it was ended")
        )

    def _end(self, attempt: DecodeAttempt) -> None:
        """Starts to give back the attempt's resources."""
        self._awaiting.pop(attempt.work.transfer_id, None)
        self._closing.start(self._close(attempt))

    async def _close(self, attempt: DecodeAttempt) -> None:
        transfer_id = attempt.work.transfer_id
        try:
            await attempt.close()
        except Exception:
            log.exception("closing %s failed", transfer_id)
        finally:
            self._live.pop(transfer_id, None)
            self._admission.release(transfer_id)
            self._on_room()
            if self._admission.request_count == 0:
                self._idle.set()
            record_attempt(self._telemetry, attempt)
        self._on_closed(attempt)

    def admit_sending(self, transfer_id: str, token_count: int) -> None:
        """Raises unless cached KV of an attempt may be sent now: once, and while blocks for so many tokens are free.

        They are not reserved, so that no attempt is refused for it. Raises DecodeFull or DuplicateTransfer.
        """
        self._seen.check(transfer_id)
        self._admission.check(
            prompt_tokens=token_count,
            max_tokens=0,
            quarantined_blocks=self._receiver.quarantined_blocks,
        )
        self._seen.remember(transfer_id)

    def status(self) -> worker_pb2.WatchStatusResponse:
        """The state that WatchStatus reports now."""
        usage = self._engine.usage()
        draining = self.draining
        states = worker_pb2.WatchStatusResponse
        return worker_pb2.WatchStatusResponse(
            worker_id=self._ref.worker_id,
            incarnation=self._ref.incarnation,
            state=states.STATE_DRAINING if draining else states.STATE_SERVING,
            running_requests=usage.running_requests,
            waiting_requests=usage.waiting_requests,
            total_blocks=self._engine.descriptor.ranks[0].block_count,
            reserved_blocks=self._admission.reserved_blocks,
            quarantined_blocks=self._receiver.quarantined_blocks,
            active_transfers=self._receiver.active_count,
            used_blocks=usage.used_blocks,
            distrusted_workers=[
                worker_pb2.DistrustedWorker(
                    worker_id=one.worker_id, incarnation=one.incarnation, detail=detail
                )
                for one, detail in self._receiver.rejected_senders.items()
            ],
        )

    def start_drain(self, notice_s: float) -> None:
        """Refuses new attempts after `notice_s`. Until then routers may not have read the status."""
        self.draining = True
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
            attempt.interrupt(self.refusal())
        await self._idle.wait()
        await self._closing.wait()

    def refusal(self) -> HeadraceError:
        """The error for requests to a worker that shuts down."""
        worker_id = self._ref.worker_id
        return Draining(f"{worker_id} is shutting down", metadata={"worker_id": worker_id})
