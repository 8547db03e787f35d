"""One attempt at one request: reserve on decode, have the prompt computed, stream the tokens.

Both legs are watched together. Whichever fails first ends the other, and so does giving the attempt
up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import sampling_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import (
    DeadlineExceeded,
    HeadraceError,
    NotFound,
    ProtocolViolation,
    Unauthenticated,
    WorkerGone,
)
from headrace_common.identity import new_transfer_id
from headrace_common.rpc.status import error_from_rpc
from headrace_common.rpc.tickets import TicketSigner
from headrace_common.rpc.trace_context import metadata_with_trace, traceparent
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry
from headrace_kv.layout.layout import WorkerRef
from headrace_router.dispatch.first_token import BY_DECODE, BY_PREFILL, FROM_LOGITS, Policy
from headrace_router.placement import Decision
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from headrace_router.request.request import RoutedRequest
from headrace_router.request.validation import PreparedRequest

_LOG = logging.getLogger(__name__)


class Attempt:
    """Runs once. After a failure, `prefill_failed` and `prefill_worker` say which leg it was.

    `terms` are those of the task, if the prompt goes to a prefill worker, and `first_token` says who makes that token.
    What the answer holds already is gone on after.
    """

    def __init__(
        self,
        job: RoutedRequest,
        decision: Decision,
        *,
        number: int,
        first_token: Policy,
        terms: TaskTerms,
        channel: grpc.aio.Channel,
        queue: PrefillQueue,
        signer: TicketSigner,
        telemetry: Telemetry,
    ) -> None:
        self._request = job.request
        self._answer = job.answer
        self._generated = job.answer.generated
        self._known = job.request.token_ids + self._generated
        self._decision = decision
        self._maker = first_token
        self._deadline = job.deadline
        self._terms = terms
        self._queue = queue
        self._signer = signer
        self._tenant = job.tenant
        self._telemetry = telemetry
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self.transfer_id = new_transfer_id()
        self._span = telemetry.tracer.start_span(
            schema.SPAN_ATTEMPT,
            context=trace.set_span_in_context(job.root),
            attributes=self._attributes(number),
        )
        self._context = trace.set_span_in_context(self._span)
        self._reserved = decode_pb2.Reserved()
        self._queued: QueuedTask | None = None
        self._reading: asyncio.Task[decode_pb2.GenerateResponse] | None = None
        self._decode_spoke = False
        self._cut_short = False
        self._decode_worker = f"decode worker {decision.worker.ref.worker_id}"
        self._waited_for = f"a reservation on {self._decode_worker}"
        self.prefill_failed = False

    @property
    def decode_worker(self) -> WorkerRef:
        """The decode worker that it goes to."""
        return self._decision.worker.ref

    @property
    def decode_spoke(self) -> bool:
        """Whether the decode worker has sent a token, after which no prefill is to blame."""
        return self._decode_spoke

    @property
    def prefill_worker(self) -> WorkerRef | None:
        """The prefill worker that pulled the task."""
        return self._queued.worker if self._queued is not None else None

    async def run(self) -> AttemptOutcome:
        """Adds the tokens to the answer as they come. Raises what the attempt failed with."""
        call = self._open()
        succeeded = False
        try:
            with self._promised():
                await self._reserve(call)
            self._enqueue()
            outcome = await self._stream(call)
            succeeded = True
            return outcome
        except HeadraceError as error:
            _mark_failed(self._span, error)
            raise
        finally:
            call.cancel()
            await self._end_reading()
            self._end(succeeded)

    def _open(self) -> Any:
        request = decode_request(self._request, self._decision, self.transfer_id, self._generated)
        if self._maker != BY_DECODE:
            request.first_token = self._maker
        worker_id = self._decision.worker.ref.worker_id
        request.ticket = self._signer.sign(request, worker_id, self._tenant)
        return self._stub.Generate(
            request,
            timeout=self._deadline.remaining_s(),
            metadata=metadata_with_trace(context=self._context),
        )

    async def _reserve(self, call: Any) -> None:
        start_unix_ns = time.time_ns()
        problem = ""
        try:
            first = await self._read(call)
            if first.WhichOneof("event") != "reserved":
                raise ProtocolViolation(f"{self._decision.worker.ref} did not begin with Reserved")
            self._reserved = first.reserved
        except HeadraceError as error:
            problem = error.detail
            raise
        finally:
            self._record(schema.SPAN_RESERVE, start_unix_ns, time.time_ns(), {}, problem)

    def _promised(self) -> AbstractContextManager[None]:
        if not self._decision.remote:
            return nullcontext()
        return self._queue.expect_task(self._decision.worker.layout, len(self._known) - 1)

    def _enqueue(self) -> None:
        worker = self._decision.worker
        if not self._decision.remote or self._reserved.start_token >= self._reserved.end_token:
            self._waited_for = f"the first token from {self._decode_worker}"
            return
        deadline_time = Timestamp()
        deadline_time.FromNanoseconds(int(self._deadline.unix_s * 1e9))
        task = prefill_pb2.PrefillTask(
            transfer_id=self.transfer_id,
            request_id=self._request.request_id,
            token_ids=self._known[:-1] if self._maker == BY_DECODE else self._known,
            start_token=self._reserved.start_token,
            decode_worker_id=worker.ref.worker_id,
            decode_incarnation=worker.ref.incarnation,
            decode_endpoint=worker.endpoint,
            deadline_time=deadline_time,
            traceparent=traceparent(self._span),
            sampling=self._request.sampling if self._maker == BY_PREFILL else None,
            send_logits=self._maker == FROM_LOGITS,
        )
        try:
            self._queued = self._queue.enqueue(task, layout=worker.layout, terms=self._terms)
        except WorkerGone:
            self.prefill_failed = True
            raise

    async def _stream(self, call: Any) -> AttemptOutcome:
        answer = self._answer
        if self._maker == BY_PREFILL and self._queued is not None:
            ended = await self._take_first_token(call, self._queued)
            if ended is not None:
                self._cut_short = True
                return ended
        while True:
            event = await self._next(call)
            kind = event.WhichOneof("event")
            if kind == "tokens":
                if self._maker == FROM_LOGITS and not answer.started:
                    await answer.add_first(event.tokens, FROM_LOGITS)
                    # What needs no KV cache does not show that prefill has done its part.
                    self._decode_spoke = len(event.tokens.token_ids) > 1
                else:
                    self._decode_spoke = True
                    await answer.add(event.tokens)
                if answer.stopped:
                    return self.outcome_of(sampling_pb2.FINISH_REASON_STOP)
                if answer.started:
                    self._waited_for = f"the next token from {self._decode_worker}"
            elif kind == "finished":
                finished = event.finished
                return self._outcome(
                    finished.reason, finished.cached_tokens, finished.transferred_tokens
                )
            else:
                raise ProtocolViolation(
                    f"{self._decision.worker.ref} sent {kind or 'nothing'} within its answer"
                )

    def outcome_of(self, reason: sampling_pb2.FinishReason.ValueType) -> AttemptOutcome:
        """Of an answer that ended before decode's own count came; the reservation says as much."""
        if not self._decision.remote:
            return AttemptOutcome(reason, 0, 0)
        start, end = self._reserved.start_token, self._reserved.end_token
        return self._outcome(reason, start, end - start)

    def _outcome(
        self, reason: sampling_pb2.FinishReason.ValueType, cached_tokens: int, transferred: int
    ) -> AttemptOutcome:
        """Tokens of the answer that were computed again are not counted: they are nobody's prompt."""
        prompt_tokens = len(self._request.token_ids)
        cached_tokens = min(cached_tokens, prompt_tokens)
        return AttemptOutcome(
            reason, cached_tokens, min(transferred, prompt_tokens - cached_tokens)
        )

    async def _take_first_token(self, call: Any, queued: QueuedTask) -> AttemptOutcome | None:
        """Adds prefill's token to the answer and tells the decode worker; an outcome when it ends the answer."""
        first = await self._first_token(call, queued)
        logprobs = [first.logprobs] if first.HasField("logprobs") else []
        tokens = decode_pb2.Tokens(token_ids=[first.token_id], logprobs=logprobs)
        await self._answer.add_first(tokens, BY_PREFILL)
        cached_tokens = self._reserved.start_token
        if self._answer.stopped or first.token_id in self._request.stop_token_ids:
            return AttemptOutcome(sampling_pb2.FINISH_REASON_STOP, cached_tokens, 0)
        if self._request.sampling.max_tokens == 1:
            return AttemptOutcome(sampling_pb2.FINISH_REASON_LENGTH, cached_tokens, 0)
        try:
            await self._tell_decode(first.token_id)
        except NotFound:
            # The attempt has ended there, and its stream says why.
            _LOG.info("%s took no first token of %s", self._decode_worker, self.transfer_id)
        return None

    async def _first_token(self, call: Any, queued: QueuedTask) -> prefill_pb2.FirstToken:
        """What prefill makes, unless it fails, or the decode worker has an error to tell, before."""
        read = self._reading = asyncio.create_task(self._read(call))
        any_news: set[asyncio.Future[Any]] = {queued.first_token, queued.outcome, read}
        await asyncio.wait(any_news, return_when=asyncio.FIRST_COMPLETED)
        if queued.first_token.done():
            return queued.first_token.result()
        if read.done():
            await read
            raise ProtocolViolation(f"{self._decision.worker.ref} did not wait for its first token")
        self.prefill_failed = True
        raise queued.outcome.result().error or ProtocolViolation(
            f"prefill worker {queued.worker} did not say the first token"
        )

    async def _tell_decode(self, token_id: int) -> None:
        try:
            await self._stub.SetFirstToken(
                decode_pb2.SetFirstTokenRequest(
                    transfer_id=self.transfer_id,
                    incarnation=self._decision.worker.ref.incarnation,
                    token_id=token_id,
                ),
                timeout=self._deadline.remaining_s(),
                metadata=metadata_with_trace(context=self._context),
            )
        except grpc.aio.AioRpcError as error:
            raise self._named(error_from_rpc(error)) from error

    async def _next(self, call: Any) -> decode_pb2.GenerateResponse:
        """The next event of the decode worker; until its first token, a failed prefill comes first."""
        queued = self._queued
        if queued is None or self._decode_spoke:
            return await self._read(call)
        read = self._reading = self._reading or asyncio.create_task(self._read(call))
        both: set[asyncio.Future[Any]] = {read, queued.outcome}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not read.done():
            error = queued.outcome.result().error
            if error is not None:
                self.prefill_failed = True
                raise error
        event = await read
        self._reading = None
        return event

    async def _end_reading(self) -> None:
        """The call has ended, and with it what was read of it."""
        read = self._reading
        if read is not None:
            read.cancel()
            await asyncio.wait({read})
            if not read.cancelled():
                # Nobody is left who wants to hear of it.
                read.exception()

    async def _read(self, call: Any) -> decode_pb2.GenerateResponse:
        try:
            event = await call.read()
        except grpc.aio.AioRpcError as error:
            raise self._named(error_from_rpc(error)) from error
        if event is grpc.aio.EOF:
            worker = self._decision.worker.ref
            raise WorkerGone(
                f"decode worker {worker} ended its stream too early",
                metadata={"worker_id": worker.worker_id},
            )
        return event  # type: ignore[no-any-return]

    def _named(self, error: HeadraceError) -> HeadraceError:
        """gRPC's own deadline does not say what was waited for, nor a broken connection to whom. A client would take a
        refused ticket for its own key.
        """
        ref = self._decision.worker.ref
        if isinstance(error, DeadlineExceeded) and "waited_for" not in error.metadata:
            what = self._waiting()
            return DeadlineExceeded(
                f"the deadline passed while waiting for {what}", metadata={"waited_for": what}
            )
        if isinstance(error, WorkerGone) and "worker_id" not in error.metadata:
            return WorkerGone(
                f"decode worker {ref} vanished: {error.detail}",
                metadata={**error.metadata, "worker_id": ref.worker_id},
            )
        if isinstance(error, Unauthenticated):
            return WorkerGone(
                f"decode worker {ref} refused this router's ticket: {error.detail}",
                metadata={**error.metadata, "worker_id": ref.worker_id},
            )
        return error

    def _waiting(self) -> str:
        queued = self._queued
        if queued is None or self._waited_for.startswith("the next token"):
            return self._waited_for
        if queued.worker is None:
            return f"a prefill worker to pull the prompt, {queued.tasks_ahead} were ahead of it"
        if queued.outcome.done():
            return f"the first token from {self._decode_worker}"
        source = f"prefill worker {queued.worker.worker_id}"
        return f"the KV cache from {source} to {self._decode_worker}"

    def _end(self, succeeded: bool) -> None:
        queued = self._queued
        if queued is not None:
            self._record_queue_span(queued)
            if queued.worker is not None:
                self._span.set_attribute(
                    schema.ATTRIBUTE_PREFILL_WORKER_ID, queued.worker.worker_id
                )
            # After a success the worker's TaskDone is on its way, unless the first token was all there is.
            if not succeeded or self._cut_short:
                queued.cancel()
        self._span.end()

    def _record_queue_span(self, queued: QueuedTask) -> None:
        self._record(
            schema.SPAN_QUEUE,
            queued.queued_unix_ns,
            queued.pulled_unix_ns or time.time_ns(),
            {schema.ATTRIBUTE_QUEUE_DEPTH: queued.tasks_ahead},
            "" if queued.pulled_unix_ns else "never pulled",
        )

    def _record(
        self, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, int], error: str
    ) -> None:
        self._telemetry.record_span(name, self._context, start_ns, end_ns, attributes, error)

    def _attributes(self, number: int) -> dict[str, str | int]:
        return {
            schema.ATTRIBUTE_ATTEMPT: number,
            schema.ATTRIBUTE_TRANSFER_ID: self.transfer_id,
            schema.ATTRIBUTE_REQUEST_ID: self._request.request_id,
            schema.ATTRIBUTE_DECODE_WORKER_ID: self._decision.worker.ref.worker_id,
            schema.ATTRIBUTE_PLACEMENT: "remote" if self._decision.remote else "local",
            schema.ATTRIBUTE_GENERATED_TOKENS: len(self._generated),
        }


def decode_request(
    request: PreparedRequest, decision: Decision, transfer_id: str, generated: tuple[int, ...]
) -> decode_pb2.GenerateRequest:
    """What the chosen worker is asked, without a ticket; `generated` is what there is of the answer."""
    return decode_pb2.GenerateRequest(
        request_id=request.request_id,
        transfer_id=transfer_id,
        incarnation=decision.worker.ref.incarnation,
        token_ids=request.token_ids + generated,
        generated_token_count=len(generated),
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        remote_prefill=decision.remote,
    )


def _mark_failed(span: Span, error: HeadraceError) -> None:
    span.set_status(Status(StatusCode.ERROR, error.detail))
    span.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How a successful attempt ended."""

    reason: sampling_pb2.FinishReason.ValueType
    cached_tokens: int
    transferred_tokens: int
