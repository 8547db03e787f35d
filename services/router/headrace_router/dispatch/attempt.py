"""One attempt at a request: reserve on a decode worker, have the prompt prefilled, and stream the tokens.

The attempt watches both workers. The failure of one ends the other, and so does the end of the attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc.aio

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import bounds_pb2, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    NotFound,
    ProtocolViolation,
    Unauthenticated,
    WorkerGone,
)
from headrace_common.logs import TRACE_NAMES
from headrace_common.rpc.status import error_from_rpc
from headrace_common.rpc.trace_context import carrier_of
from headrace_common.telemetry.setup import child_context
from headrace_frontend.running.attempt import AdmittedRequest, AttemptOutcome, RunningAttempt
from headrace_kv.layout import WorkerRef
from headrace_router.decode_link.answer import LinkedAnswer, Logprobs
from headrace_router.dispatch.messages import (
    BY_DECODE,
    BY_PREFILL,
    FROM_HIDDEN_STATE,
    Policy,
    begins_early,
    prefill_task,
    worker_gone,
)
from headrace_router.dispatch.retry_policy import FailedAttempt
from headrace_router.placement import Decision
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from headrace_router.tracing.attempt_record import RoutedAttempt
from headrace_router.workers.connection import LoadReservation

_LOG = logging.getLogger(__name__)
_REPORT_S: Final = 0.5


class Attempt(RunningAttempt, LinkedAnswer):
    """Runs once, from its construction to `close`.

    Every error of the decode worker names it. A passed deadline also names what was waited for.
    """

    def __init__(
        self,
        queue: PrefillQueue,
        request: AdmittedRequest,
        record: RoutedAttempt,
        *,
        decision: Decision,
        load: LoadReservation,
        terms: TaskTerms | None,
        ticket_key_id: bytes,
        first_token: Policy = BY_DECODE,
        bounds: bounds_pb2.TokenBounds | None = None,
        on_computed: Callable[[], None] = lambda: None,
    ) -> None:
        """`record` gets the steps.

        `load` is reserved on the decode worker of `decision`. `terms` are those of the prefill task, None without one.
        `ticket_key_id` is that of the key that signs the handoff tickets. `on_computed` is called once or more when the
        prompt is computed, or is not to be computed.
        """
        super().__init__(request, decision.worker.ref, remote=decision.remote)
        self.worker, self.transfer_id = decision.worker, self._call.transfer_id
        self._take_over: Callable[[], None] | None = None
        self.successor: Attempt | None = None
        """The attempt that the answer has moved to."""
        self._held: list[tuple[Sequence[int], Logprobs, Logprobs]] | None = None
        self.record = record
        self._queue = queue
        self._decision = decision
        self._terms = terms
        self._first_token_by = first_token
        self._on_computed = on_computed
        self._queued: QueuedTask | None = None
        self._received_tokens = False
        self._prefill_failed = False
        self._decode_waits = False
        """Whether the answer has the first token of prefill, and decode has not."""
        self._calling: asyncio.Future[Any] | None = None
        """Sends the first token of prefill to decode."""
        self._expected: Callable[[], None] = lambda: None
        """Ends the count of the prompt in the prefill queue, once the decode worker has reserved its blocks."""
        call = self._call
        span_context = child_context(request.record.context)
        TRACE_NAMES.add(call.transfer_id, span_context)
        self._carrier = carrier_of(span_context)
        record.started(span_context, call.transfer_id, generated_tokens=len(self.given))
        if first_token != BY_DECODE:
            call.first_token = first_token
        call.ticket_key_id = ticket_key_id
        call.early_admission = begins_early(call, decision)
        call.computes_from = decision.computes_from
        if bounds is not None:
            call.bounds.CopyFrom(bounds)
        self._token_ids = request.prepared.all_token_ids(self.given)
        self.load = load
        self._link = load.links.usable()
        images = request.prepared.images
        self._link.open(call, self._token_ids, request.deadline, self._carrier, self, images)
        record.opened(self, first_token)
        if terms is not None:
            tokens = terms.missing_tokens(len(self._token_ids.ids) - 1)
            layout = decision.worker.layout
            self._expected = queue.expect_task(layout, tokens, terms.priority, terms.tenant)

    @property
    def prefill_worker(self) -> WorkerRef | None:
        """The prefill worker that pulled the task."""
        return self._queued.worker if self._queued is not None else None

    def close(self) -> None:
        """Ends the requests to both workers, unless they have ended. Those of its successor, once it has one."""
        if self.successor is not None:
            self.successor.close()
            return
        self._count_no_more()
        self.load.release()
        self._link.release(self)
        if self._calling is not None:
            self._calling.cancel()
        ended, queued = self.ended, self._queued
        self.record.ended(queued)
        # After decode's end, the worker's TaskDone is on its way.
        succeeded = ended.done() and not ended.cancelled() and ended.exception() is None
        if queued is not None and (self._decode_waits or not succeeded):
            queued.cancel()

    def lead_after(self, take_over: Callable[[], None]) -> None:
        """Leads once it has a token and `take_over` has returned. Its error ends this attempt."""
        self._take_over = take_over

    def next_tokens(self) -> asyncio.Future[None]:
        """Done once the response has got more tokens."""
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def add(token_ids: Sequence[int], logprobs: Logprobs, prompt: Logprobs) -> bool:
            if not arrived.done():
                arrived.set_result(None)
            return self.response.add_tokens(token_ids, logprobs, prompt)

        self.forward(add)
        return arrived

    def hold(self) -> None:
        """The response gets no more tokens, until `let_go`. At most two windows of a link are held."""
        held = self._held = []

        def keep(token_ids: Sequence[int], logprobs: Logprobs, prompt: Logprobs) -> bool:
            held.append((token_ids, logprobs, prompt))
            return False

        self.forward(keep)

    def let_go(self) -> None:
        """The response gets the held tokens, and all others again."""

        def give(batches: list[tuple[Sequence[int], Logprobs, Logprobs]]) -> None:
            for batch in batches:
                self.response.add_tokens(*batch)

        held, self._held = self._held, None
        if held is None or self.ended.done():
            return
        self.forward(self.response.add_tokens)
        self.use(give, held)
        if not self.response.full:
            self.return_credit()

    def move_to(self, successor: Attempt) -> None:
        """The successor generates from the tokens that the response has. The held ones are dropped.

        Raises Cancelled once the attempt has ended.
        """
        if self.ended.done():
            raise Cancelled("the answer has ended where it was")
        self._held = None
        self._end(self.outcome_of(sampling_pb2.FINISH_REASON_UNSPECIFIED))
        self.close()
        self.successor = successor

    def finish(self, finished: decode_pb2.Finished) -> None:
        if self._held is not None:
            self.let_go()
        super().finish(finished)

    async def failure(self, error: HeadraceError) -> FailedAttempt:
        """The value that describes this attempt after it has failed with `error`."""
        queued, late = self._queued, Deadline.after(_REPORT_S)
        return FailedAttempt(
            error,
            decode_worker=self.decode_worker,
            # Reports of prefill workers state which one has failed. Decode's error may be earlier.
            prefill_worker=await queued.failed_worker(late) if queued is not None else None,
            prefill_failed=self._prefill_failed,
            decode_generated=self.generates,
        )

    def outcome_of(self, reason: sampling_pb2.FinishReason.ValueType) -> AttemptOutcome:
        if self._decode_waits and self._reserved is not None:
            # No KV was sent.
            return AttemptOutcome(reason, self._reserved.start_token)
        return super().outcome_of(reason)

    def worker_failed(self, error: HeadraceError) -> None:
        """The decode worker has failed, or the deadline has passed."""
        self.fail(self._explained(error))

    def fail(self, error: Exception) -> None:
        self.let_go()
        if isinstance(error, HeadraceError) and not self.ended.done():
            self.record.failed(error)
        super().fail(error)

    def reserve(self, reserved: decode_pb2.Reserved) -> None:
        """The decode worker has admitted the request, or it has the blocks of an admitted one."""
        if self.ended.done():
            return
        self._count_no_more()
        before, self._reserved = self._reserved, reserved
        if before is None:
            if self._terms is not None:
                self._enqueue_prefill(reserved, self._terms)
        elif not before.admitted:
            raise ProtocolViolation(f"{self.decode_worker} sent Reserved twice")
        elif self._queued is not None:
            if reserved.start_token >= reserved.end_token:
                queued, self._queued = self._queued, None
                queued.cancel()
                self._on_computed()
            elif self._queued.first_token.done():
                self._use_first_token(self._queued)

    def _enqueue_prefill(self, reserved: decode_pb2.Reserved, terms: TaskTerms) -> None:
        if reserved.start_token >= reserved.end_token:
            return
        task = prefill_task(
            self._call,
            self._token_ids,
            self._decision,
            start_token=reserved.start_token,
            end_token=reserved.end_token,
            first_token=self._first_token_by,
            traceparent=self._carrier["traceparent"],
        )
        try:
            queued = self._queue.enqueue(task, layout=self._decision.worker.layout, terms=terms)
        except WorkerGone:
            self._prefill_failed = True
            raise
        self._queued = queued
        self.record.enqueued(queued)
        if self._first_token_by == BY_PREFILL:
            queued.first_token.add_done_callback(self._prefill_changed)
        queued.outcome.add_done_callback(self._prefill_changed)

    def _prefill_changed(self, _: asyncio.Future[Any]) -> None:
        """The task has a first token, or it has ended."""
        queued = self._queued
        if queued is None:
            return
        if queued.outcome.done():
            self._on_computed()
        if self.ended.done() or self.generates:
            return
        try:
            if queued.first_token.done():
                self._use_first_token(queued)
            if queued.outcome.done():
                self._require_success(queued)
        except Exception as error:  # noqa: BLE001 - the attempt raises it
            self.fail(error)

    def _require_success(self, queued: QueuedTask) -> None:
        """Raises the error of a prefill that fails before decode generates."""
        error = queued.outcome.result()
        if self._first_token_by == BY_PREFILL and not queued.first_token.done():
            error = error or ProtocolViolation(
                f"prefill worker {queued.worker} did not send the first token"
            )
        if error is not None and not self.ended.done():
            self._prefill_failed = True
            raise error

    def _use_first_token(self, queued: QueuedTask) -> None:
        """Adds the token that prefill generated, and sends it to decode, which takes it once it has blocks."""
        reserved = self._reserved
        if reserved is None or reserved.admitted or self._calling is not None:
            return
        first, prepared = queued.first_token.result(), self.request.prepared
        if first.token_id >= self.vocabulary_size:
            self._prefill_failed = True
            raise ProtocolViolation(
                f"prefill worker {queued.worker} sent token {first.token_id}, and the vocabulary has "
                f"{self.vocabulary_size}"
            )
        self._decode_waits = True
        self.response.begins_by(BY_PREFILL)
        self.response.add_tokens(
            [first.token_id], [first.logprobs] if first.HasField("logprobs") else []
        )
        if first.token_id in prepared.stop_token_ids:
            self._end(self.outcome_of(sampling_pb2.FINISH_REASON_STOP))
        elif prepared.sampling.max_tokens == 1:
            self._end(self.outcome_of(sampling_pb2.FINISH_REASON_LENGTH))
        if self.ended.done():
            return
        self._decode_waits = False
        stub = decode_pb2_grpc.DecodeServiceStub(self.load.links.channel)
        request = decode_pb2.SetFirstTokenRequest(
            transfer_id=self._call.transfer_id,
            incarnation=self.decode_worker.incarnation,
            token_id=first.token_id,
        )
        self._calling = asyncio.ensure_future(
            stub.SetFirstToken(
                request,
                timeout=self.request.deadline.remaining_s(),
                metadata=tuple(self._carrier.items()),
            )
        )
        self._calling.add_done_callback(self._first_token_set)

    def _first_token_set(self, calling: asyncio.Future[Any]) -> None:
        error = None if calling.cancelled() else calling.exception()
        if not isinstance(error, Exception) or self.generates:
            return
        known = error_from_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else None
        if isinstance(known, NotFound):
            # The attempt has ended there. The stream reports why.
            _LOG.info(
                "decode worker %s did not accept the first token of %s",
                self.decode_worker.worker_id,
                self._call.transfer_id,
            )
        else:
            self.fail(error if known is None else self._explained(known))

    def _begin(self, count: int) -> None:
        self._require_reservation()
        if self._take_over is not None:
            self._take_over()
            self.lead()
        by = self._first_token_by
        if by == BY_PREFILL and self._queued is not None and self._calling is None:
            raise ProtocolViolation(f"{self.decode_worker} did not wait for its first token")
        from_state = by == FROM_HIDDEN_STATE and not self.response.started
        if from_state:
            self.response.begins_by(FROM_HIDDEN_STATE)
        # The token from a hidden state alone does not prove that prefill has succeeded.
        self.generates = not from_state or count > 1
        if self.generates:
            self.forward(self.response.add_tokens)
        self._received_tokens = True
        self._on_computed()

    def _drained(self) -> None:
        self.return_credit()

    def _count_no_more(self) -> None:
        expected, self._expected = self._expected, lambda: None
        expected()

    def _explained(self, error: HeadraceError) -> HeadraceError:
        """The error with the worker's name. A client would take a rejected credential for its own API key."""
        if isinstance(error, DeadlineExceeded) and "waited_for" not in error.metadata:
            return DeadlineExceeded.waiting_for(self._waited_for())
        if isinstance(error, WorkerGone) and "worker_id" not in error.metadata:
            return worker_gone(self.decode_worker, f"vanished: {error.detail}", error)
        if isinstance(error, ProtocolViolation):
            ref = self.decode_worker
            metadata = {**error.metadata, "worker_id": ref.worker_id}
            return ProtocolViolation(f"decode worker {ref} {error.detail}", metadata=metadata)
        if isinstance(error, Unauthenticated):
            return worker_gone(self.decode_worker, f"rejected this router: {error.detail}", error)
        return error

    def _waited_for(self) -> str:
        """The event that the attempt waits for now, for an error message."""
        decode = f"decode worker {self.decode_worker.worker_id}"
        queued = self._queued
        if self._reserved is None:
            return f"a reservation on {decode}"
        if self._received_tokens:
            return f"the next token from {decode}"
        if queued is None:
            return f"the first token from {decode}"
        if queued.worker is None:
            return f"a prefill worker to pull the prompt, {queued.tasks_ahead} were ahead of it"
        if queued.outcome.done():
            return f"the first token from {decode}"
        return f"the KV cache from prefill worker {queued.worker.worker_id} to {decode}"
