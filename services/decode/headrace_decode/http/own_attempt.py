"""One attempt at a request of this worker's own client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import receipt_pb2, sampling_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.latency.steps import decode_steps
from headrace_common.rpc.trace_context import carrier_of
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.http.prefill import RouterPrefills
from headrace_decode.timestamps import RequestTimestamps
from headrace_engine.interface import DecodeTokens
from headrace_engine.proto import logprobs_to_proto
from headrace_frontend.running.attempt import AdmittedRequest, AttemptOutcome, RunningAttempt
from headrace_frontend.running.receipt import AttemptReceipt
from headrace_frontend.running.record import AttemptRecord, now_us
from headrace_kv.layout import WorkerRef

_Logprobs: TypeAlias = Sequence[sampling_pb2.TokenLogprobs]
_Batch: TypeAlias = tuple[Sequence[int], _Logprobs, _Logprobs]
"""Tokens, their logprobs, and those of the prompt."""


@dataclass(eq=False, slots=True)
class OwnRecord(AttemptRecord):
    """An attempt by this worker's monotonic clock, from its admission by the engine on."""

    times: RequestTimestamps = field(kw_only=True)
    outcome: asyncio.Task[prefill_pb2.EnqueueResponse] | None = None
    """The prefill through a router."""
    _cost: asyncio.Future[None] = field(default_factory=asyncio.Future, init=False)
    """Cancelled once it is known what the attempt has cost here."""
    _asked_us: int = 0
    _answered_us: int = 0

    def asked(self, prefill: asyncio.Task[prefill_pb2.EnqueueResponse]) -> None:
        """A router is asked for the prefill."""
        self._asked_us, self.remote = now_us(), True
        self.outcome = prefill
        prefill.add_done_callback(self._answered)

    def _answered(self, prefill: asyncio.Task[prefill_pb2.EnqueueResponse]) -> None:
        self._answered_us = now_us()
        # An error after the first token is of no interest: the engine has the KV cache.
        if not prefill.cancelled():
            prefill.exception()

    @property
    def answer(self) -> prefill_pb2.EnqueueResponse:
        """What the router has reported. Empty without a report."""
        task = self.outcome
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return prefill_pb2.EnqueueResponse()
        return task.result()

    @property
    def missing_report(self) -> asyncio.Future[Any] | None:
        outcome = self.outcome
        if outcome is not None and not outcome.done():
            return outcome
        return self._cost if self.decode_receipt is None else None

    def decoded(self, receipt: receipt_pb2.Receipt) -> None:
        AttemptRecord.decoded(self, receipt)
        self._cost.cancel()

    def receipt(self) -> AttemptReceipt:
        found = AttemptRecord.receipt(self)
        return found._replace(parts=(self.answer.receipt, *found.parts))

    def update(self) -> None:
        self.start = self.route_start
        self.decode = decode_steps(self.times.steps, self.route_start)
        answer = self.answer
        if answer.HasField("steps"):
            self.add_task(self._asked_us, self._answered_us, answer.steps)


class OwnAttempt(RunningAttempt):
    """Runs once. An AttemptSink."""

    record: OwnRecord
    """From the engine's admission on."""
    _running: DecodeAttempt

    def __init__(
        self, request: AdmittedRequest, worker: WorkerRef, prefills: RouterPrefills, *, remote: bool
    ) -> None:
        super().__init__(request, worker, remote=remote)
        self._prefills = prefills
        self._call.token_ids.MergeFrom(request.prepared.all_token_ids(self.given).ids)
        self._call.images.extend(request.prepared.images)
        self.token_count = 0
        """The tokens that the engine has given."""
        self._held: deque[_Batch] = deque()
        """What the response has no room for."""
        self._then: Callable[[], None] = lambda: None
        """Called once the response has got that."""
        self.lead()

    @property
    def reserved(self) -> bool:
        """Whether the engine has reserved blocks."""
        return self._reserved is not None

    async def run(
        self, start: Callable[[decode_pb2.GenerateRequest], Awaitable[DecodeAttempt]]
    ) -> AttemptOutcome:
        """Runs once `start` has started it. Raises HeadraceError.

        Cancellation gives back the blocks and cancels the prefill.
        """
        request_record = self.request.record
        parent = NonRecordingSpan(request_record.context)
        token = otel_context.attach(trace.set_span_in_context(parent))
        try:
            running = self._running = await start(self._call)
        finally:
            otel_context.detach(token)
        if not request_record.attempts:
            request_record.slot_acquired()
        times = running.timestamps
        self.record = record = OwnRecord(
            times.start.monotonic_ns // 1_000,
            times=times,
            block_tokens=running.engine.descriptor.layout.block_tokens,
        )
        request_record.attempts.append(record)
        try:
            running.start(self, self._engine_ended, record.decoded)
            return await self.ended
        except BaseException:
            # After the end, the router's response is on its way.
            if record.outcome is not None:
                record.outcome.cancel()
            raise
        finally:
            running.end()

    def reserve(self, reserved: decode_pb2.Reserved) -> None:
        """The engine has the blocks. A router has the missing tokens prefilled."""
        self._reserved = reserved
        if reserved.start_token < reserved.end_token:
            traceparent = carrier_of(self._running.span.get_span_context()).get("traceparent", "")
            prefill = asyncio.create_task(
                self._prefills.prefill(self.request, self._call, reserved.start_token, traceparent)
            )
            self.record.asked(prefill)
            prefill.add_done_callback(self._prefill_ended)

    def _prefill_ended(self, prefill: asyncio.Task[prefill_pb2.EnqueueResponse]) -> None:
        error = None if prefill.cancelled() else prefill.exception()
        if isinstance(error, Exception) and not self.token_count:
            self._running.interrupt(error)

    def add_first(self, tokens: DecodeTokens, times: decode_pb2.AttemptTimes | None) -> None:
        """See AttemptSink."""
        logprobs = [logprobs_to_proto(one) for one in tokens.logprobs]
        prompt_logprobs = [logprobs_to_proto(one) for one in tokens.prompt_logprobs]
        self._add((tokens.token_ids, logprobs, prompt_logprobs))

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """See AttemptSink."""
        self._add((token_ids, (), ()))

    def _add(self, batch: _Batch) -> None:
        self.token_count += len(batch[0])
        if self._held or self.response.full:
            self._held.append(batch)
            return
        try:
            self.add_batch(*batch)
        except Exception as error:  # noqa: BLE001 - the caller raises it, and the engine goes on
            self.fail(error)

    def _drained(self) -> None:
        while self._held and not self.response.full:
            self.add_batch(*self._held.popleft())
        if not self._held:
            self._then()

    def finish(self, finished: decode_pb2.Finished) -> None:
        """The engine has ended the request."""
        self._end_after_tokens(partial(super().finish, finished))

    def _engine_ended(self, error: Exception | None) -> None:
        if error is not None:
            self._end_after_tokens(partial(self.fail, error))

    def _end_after_tokens(self, end: Callable[[], None]) -> None:
        if self._held:
            self._then = end
        else:
            end()
