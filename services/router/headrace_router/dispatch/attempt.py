"""One attempt at a request: reserve on a decode worker, have the prompt prefilled, and stream the tokens.

The attempt watches both workers. The failure of one ends the other, and so does the cancellation of the attempt.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import bounds_pb2, keep_pb2, sampling_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import HeadraceError, NotFound, ProtocolViolation, WorkerGone
from headrace_common.identity import new_transfer_id
from headrace_common.logs import TRACE_NAMES
from headrace_common.rpc.trace_context import carrier_of
from headrace_common.telemetry.setup import child_context
from headrace_frontend.promises import kept_of
from headrace_frontend.request.validation import decode_request
from headrace_frontend.running.completion import AdmittedRequest, AttemptOutcome
from headrace_kv.layout import WorkerRef
from headrace_router.decode_link.answer import AnswerEvent
from headrace_router.decode_link.link import DecodeLinks
from headrace_router.dispatch.decode_call import DecodeCall
from headrace_router.dispatch.messages import (
    BY_DECODE,
    BY_PREFILL,
    FROM_HIDDEN_STATE,
    Policy,
    begins_early,
    prefill_task,
)
from headrace_router.dispatch.retry_policy import FailedAttempt
from headrace_router.placement import Decision
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from headrace_router.tracing.attempt_record import RoutedAttempt
from headrace_router.workers.directory import PlacedPrompt

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """What was decided for one attempt, number `number` from 1.

    `links` lead to the decode worker of `decision`. `terms` are those of the prefill task, if there is one.
    """

    number: int
    decision: Decision
    links: DecodeLinks
    terms: TaskTerms
    ticket_key_id: bytes
    """Of the key that signs the handoff tickets."""
    first_token: Policy = BY_DECODE
    bounds: bounds_pb2.TokenBounds | None = None
    prompt: PlacedPrompt | None = None
    """Counts the prompt on the worker that should compute it. None leaves that to the queue."""


class Attempt:
    """Runs once. It continues after the tokens that the response has already."""

    def __init__(
        self,
        queue: PrefillQueue,
        request: AdmittedRequest,
        plan: AttemptPlan,
        record: RoutedAttempt,
    ) -> None:
        """`record` gets the steps."""
        self._record = record
        self._queue = queue
        self._prepared = request.prepared
        self._response = request.response
        self._deadline = request.deadline
        self._decision = plan.decision
        self._terms = plan.terms
        self._first_token_by = plan.first_token
        self._links = plan.links
        self._prompt = plan.prompt
        self._transfer_id = new_transfer_id()
        span_context = child_context(request.record.context)
        TRACE_NAMES.add(self._transfer_id, span_context)
        self._carrier = carrier_of(span_context)
        record.started(
            span_context,
            self._transfer_id,
            number=plan.number,
            generated_tokens=request.response.completion_tokens,
        )
        generated = request.response.generated
        self._request = decode_request(
            request.prepared,
            self._transfer_id,
            generated,
            incarnation=self.decode_worker.incarnation,
            remote_prefill=plan.decision.remote,
        )
        if plan.first_token != BY_DECODE:
            self._request.first_token = plan.first_token
        self._token_ids = request.prepared.all_token_ids(generated)
        self._request.ticket_key_id = plan.ticket_key_id
        self._request.early_admission = begins_early(self._request, plan.decision)
        if plan.bounds is not None:
            self._request.bounds.CopyFrom(plan.bounds)
        self._reserved: decode_pb2.Reserved | None = None
        self._queued: QueuedTask | None = None
        self._received_tokens = False
        self._decode_generated = False
        self._prefill_failed = False

    @property
    def decode_worker(self) -> WorkerRef:
        """The decode worker that the attempt uses."""
        return self._decision.worker.ref

    @property
    def prefill_worker(self) -> WorkerRef | None:
        """The prefill worker that pulled the task."""
        return self._queued.worker if self._queued is not None else None

    async def run(self) -> AttemptOutcome:
        """Adds tokens to the response as they arrive. Raises the error with which the attempt failed."""
        call = self._open_call()
        cancel_task = True
        try:
            with self._expected_load():
                self._reserved = await call.read_reservation()
            self._enqueue_prefill(self._reserved)
            outcome = await self._add_first_token_of_prefill(call)
            if outcome is None:
                outcome = await self._add_tokens(call)
                # The worker's TaskDone is on its way.
                cancel_task = False
            return outcome
        except HeadraceError as error:
            self._record.failed(error)
            raise
        finally:
            await call.close()
            self._record.ended(self._queued)
            if cancel_task and self._queued is not None:
                self._queued.cancel()

    def failure(self, error: HeadraceError) -> FailedAttempt:
        """The value that describes this attempt after `run` raised `error`."""
        return FailedAttempt(
            error,
            decode_worker=self.decode_worker,
            prefill_worker=self.prefill_worker,
            prefill_failed=self._prefill_failed,
            decode_generated=self._decode_generated,
        )

    def outcome_of(self, reason: sampling_pb2.FinishReason.ValueType) -> AttemptOutcome:
        """The outcome for a response that ended before the decode worker's Finished, by the reservation's counts."""
        if not self._decision.remote or self._reserved is None:
            return AttemptOutcome(reason, 0, 0)
        start, end = self._reserved.start_token, self._reserved.end_token
        return self._outcome(reason, start, end - start)

    def _outcome(
        self,
        reason: sampling_pb2.FinishReason.ValueType,
        cached_tokens: int,
        transferred: int,
        kept: keep_pb2.Kept | None = None,
    ) -> AttemptOutcome:
        prompt_tokens = len(self._prepared.token_ids)
        return AttemptOutcome.of_prompt(reason, cached_tokens, transferred, prompt_tokens, kept)

    def _open_call(self) -> DecodeCall:
        call = DecodeCall(
            self._links,
            self.decode_worker,
            self._request,
            self._token_ids,
            self._prepared.images,
            deadline=self._deadline,
            carrier=self._carrier,
            waited_for=self._waited_for,
        )
        self._record.opened(call.answer, self._first_token_by)
        return call

    def _expected_load(self) -> AbstractContextManager[None]:
        """Counts the prompt in the prefill queue until the decode worker has reserved its blocks."""
        if not self._decision.remote:
            return nullcontext()
        return self._queue.expect_task(
            self._decision.worker.layout,
            self._terms.missing_tokens(len(self._token_ids.ids) - 1),
            self._terms.priority,
            self._terms.tenant,
        )

    def _enqueue_prefill(self, reserved: decode_pb2.Reserved) -> None:
        if not self._decision.remote or reserved.start_token >= reserved.end_token:
            return
        task = prefill_task(
            self._request,
            self._token_ids,
            self._decision,
            start_token=reserved.start_token,
            first_token=self._first_token_by,
            traceparent=self._carrier["traceparent"],
        )
        try:
            self._queued = self._queue.enqueue(
                task, layout=self._decision.worker.layout, terms=self._terms
            )
        except WorkerGone:
            self._prefill_failed = True
            raise
        self._record.enqueued(self._queued)
        if self._prompt is not None:
            self._queued.outcome.add_done_callback(self._prompt_computed)

    def _blocks_reserved(self, reserved: decode_pb2.Reserved) -> bool:
        """The decode worker has the blocks of an admitted request. Whether it needs a prefill.

        Raises ProtocolViolation the second time.
        """
        if self._reserved is None or not self._reserved.admitted:
            raise ProtocolViolation(f"{self.decode_worker} sent Reserved twice")
        self._reserved = reserved
        if self._queued is not None and reserved.start_token >= reserved.end_token:
            self._queued.cancel()
            self._queued = None
        return self._queued is not None

    def _prompt_computed(self, outcome: asyncio.Future[Any]) -> None:
        if self._prompt is not None:
            self._prompt.computed()

    async def _add_first_token_of_prefill(self, call: DecodeCall) -> AttemptOutcome | None:
        """If prefill generates the first token: adds it, and sends it to decode. An outcome if it ends the response."""
        queued, reserved = self._queued, self._reserved
        if self._first_token_by != BY_PREFILL or queued is None or reserved is None:
            return None
        # The decode worker takes a token once it has blocks.
        if reserved.admitted and not self._blocks_reserved(await call.read_reservation()):
            return None
        first = await self._wait_for_first_token(call, queued)
        logprobs = [first.logprobs] if first.HasField("logprobs") else []
        tokens = decode_pb2.Tokens(token_ids=[first.token_id], logprobs=logprobs)
        await self._response.add_first_tokens(tokens, BY_PREFILL)
        cached_tokens = self._reserved.start_token if self._reserved is not None else 0
        if self._response.stopped or first.token_id in self._prepared.stop_token_ids:
            return AttemptOutcome(sampling_pb2.FINISH_REASON_STOP, cached_tokens, 0)
        if self._prepared.sampling.max_tokens == 1:
            return AttemptOutcome(sampling_pb2.FINISH_REASON_LENGTH, cached_tokens, 0)
        try:
            await call.set_first_token(first.token_id)
        except NotFound:
            # The attempt has ended there. The stream reports why.
            _LOG.info(
                "decode worker %s did not accept the first token of %s",
                self.decode_worker.worker_id,
                self._transfer_id,
            )
        return None

    async def _wait_for_first_token(
        self, call: DecodeCall, queued: QueuedTask
    ) -> prefill_pb2.FirstToken:
        """The token that prefill generates. Raises the error if the task or the decode worker fails first."""
        read = call.read_ahead()
        events: set[asyncio.Future[Any]] = {queued.first_token, queued.outcome, read}
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if queued.first_token.done():
            return queued.first_token.result()
        if read.done():
            await read
            raise ProtocolViolation(f"{self.decode_worker} did not wait for its first token")
        self._prefill_failed = True
        raise queued.outcome.result().error or ProtocolViolation(
            f"prefill worker {queued.worker} did not send the first token"
        )

    async def _add_tokens(self, call: DecodeCall) -> AttemptOutcome:
        """Adds the decode worker's tokens to the response until one of them ends it."""
        while True:
            event = await self._next_event(call)
            if isinstance(event, decode_pb2.Tokens):
                await self._add_batch(event)
                if self._decode_generated:
                    # The prefill cannot fail any more, so only the end and errors need this task.
                    call.answer.forward(self._response.take_tokens)
                if self._response.stopped:
                    return self.outcome_of(sampling_pb2.FINISH_REASON_STOP)
            elif isinstance(event, decode_pb2.Finished):
                kept = kept_of(event, self.decode_worker.incarnation, self._transfer_id)
                return self._outcome(
                    event.reason, event.cached_tokens, event.transferred_tokens, kept
                )
            else:
                self._blocks_reserved(event)

    async def _add_batch(self, tokens: decode_pb2.Tokens) -> None:
        if self._first_token_by == FROM_HIDDEN_STATE and not self._response.started:
            await self._response.add_first_tokens(tokens, FROM_HIDDEN_STATE)
            # The token from a hidden state alone does not prove that prefill has succeeded.
            self._decode_generated = len(tokens.token_ids) > 1
        else:
            self._decode_generated = True
            # Without tokens, it waits for room.
            await self._response.add_tokens(tokens)
        self._received_tokens = self._response.started
        if self._prompt is not None:
            self._prompt.computed()
            self._prompt = None

    async def _next_event(self, call: DecodeCall) -> AnswerEvent:
        """The next event of the decode worker. Raises the error of a prefill that fails before decode generates."""
        queued = self._queued
        if queued is None or self._decode_generated:
            return await call.read()
        read = call.read_ahead()
        events: set[asyncio.Future[Any]] = {read, queued.outcome}
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if not read.done():
            error = queued.outcome.result().error
            if error is not None:
                self._prefill_failed = True
                raise error
        return await call.read()

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
