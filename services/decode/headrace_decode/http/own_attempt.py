"""One attempt at a request of this worker's own client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.identity import new_transfer_id
from headrace_common.latency.steps import decode_steps
from headrace_common.rpc.trace_context import carrier_of
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.http.prefill import RouterPrefills
from headrace_decode.http.room import RoomQueue
from headrace_decode.proto import tokens_to_proto
from headrace_decode.timestamps import RequestTimestamps
from headrace_engine.interface import DecodeTokens
from headrace_frontend.promises import kept_of
from headrace_frontend.request.validation import decode_request
from headrace_frontend.running.completion import AdmittedRequest, AttemptOutcome
from headrace_frontend.running.record import AttemptRecord, now_us


@dataclass(eq=False, slots=True)
class OwnRecord(AttemptRecord):
    """An attempt by this worker's monotonic clock, from its admission by the engine on."""

    times: RequestTimestamps = field(kw_only=True)
    outcome: asyncio.Task[prefill_pb2.EnqueueResponse] | None = None
    """The prefill through a router."""
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

    def update(self) -> None:
        self.start = self.route_start
        self.decode = decode_steps(self.times.steps, self.route_start)
        answer = self.answer
        if answer.HasField("steps"):
            self.add_task(self._asked_us, self._answered_us, answer.steps)


class _Answer:
    """What an attempt has given and its reader has not taken. An AttemptSink."""

    def __init__(self) -> None:
        self.readable = asyncio.Event()
        self.token_count = 0
        self.reserved: decode_pb2.Reserved | None = None
        self.end: decode_pb2.Finished | Exception | None = None
        self._tokens: deque[decode_pb2.Tokens] = deque()

    def take(self) -> decode_pb2.Tokens | None:
        """The oldest tokens. None once all are taken."""
        if self._tokens:
            return self._tokens.popleft()
        self.readable.clear()
        return None

    def reserve(self, reserved: decode_pb2.Reserved) -> None:
        self.reserved = reserved
        self.readable.set()

    def add_first(self, tokens: DecodeTokens, times: decode_pb2.AttemptTimes | None) -> None:
        self._add(tokens_to_proto(tokens))

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        self._add(decode_pb2.Tokens(token_ids=token_ids))

    def _add(self, tokens: decode_pb2.Tokens) -> None:
        self.token_count += len(tokens.token_ids)
        self._tokens.append(tokens)
        self.readable.set()

    def finish(self, finished: decode_pb2.Finished) -> None:
        self.end = finished

    def ended(self, error: Exception | None) -> None:
        """Nothing follows."""
        self.end = error or self.end
        self.readable.set()


class OwnAttempt:
    """Adds the tokens of one attempt to the response. Runs once."""

    def __init__(
        self,
        request: AdmittedRequest,
        incarnation: str,
        *,
        remote: bool,
        room: RoomQueue,
        prefills: RouterPrefills,
    ) -> None:
        self._request = request
        self._room = room
        self._prefills = prefills
        self._call = decode_request(
            request.prepared,
            new_transfer_id(),
            request.response.generated,
            incarnation=incarnation,
            remote_prefill=remote,
        )
        tokens = request.prepared.all_token_ids(request.response.generated)
        self._call.token_ids.MergeFrom(tokens.ids)
        self._call.images.extend(request.prepared.images)
        self._reserved: decode_pb2.Reserved | None = None
        self._record: OwnRecord | None = None

    @property
    def reserved(self) -> bool:
        """Whether the engine has reserved blocks."""
        return self._reserved is not None

    @property
    def prefill_worker_id(self) -> str:
        """The prefill worker, once the router has reported it. Empty for a local prefill."""
        return self._record.answer.worker_id if self._record is not None else ""

    async def run(self) -> AttemptOutcome:
        """Raises HeadraceError. Cancellation gives back the blocks and cancels the prefill."""
        request = self._request
        token = otel_context.attach(
            trace.set_span_in_context(NonRecordingSpan(request.record.context))
        )
        try:
            running = await self._room.start(self._call, request.deadline, request.slot_wait_s())
        finally:
            otel_context.detach(token)
        if not request.record.attempts:
            request.record.slot_acquired()
        times = running.timestamps
        self._record = record = OwnRecord(times.start.monotonic_ns // 1_000, times=times)
        request.record.attempts.append(record)
        try:
            return await self._add_tokens(running, record)
        except BaseException:
            # After the end, the router's response is on its way.
            if record.outcome is not None:
                record.outcome.cancel()
            raise
        finally:
            running.end()

    async def _add_tokens(self, running: DecodeAttempt, record: OwnRecord) -> AttemptOutcome:
        response, answer = self._request.response, _Answer()
        running.start(answer, answer.ended)

        def prefill_ended(prefill: asyncio.Task[prefill_pb2.EnqueueResponse]) -> None:
            error = None if prefill.cancelled() else prefill.exception()
            if isinstance(error, Exception) and not answer.token_count:
                running.interrupt(error)

        while True:
            await answer.readable.wait()
            if self._reserved is None and answer.reserved is not None:
                self._reserved = reserved = answer.reserved
                if reserved.start_token < reserved.end_token:
                    parent = carrier_of(running.span.get_span_context()).get("traceparent", "")
                    prefill = self._start_prefill(reserved.start_token, parent)
                    record.asked(prefill)
                    prefill.add_done_callback(prefill_ended)
            while (tokens := answer.take()) is not None:
                await response.add_tokens(tokens)
                if response.stopped:
                    return self._outcome(sampling_pb2.FINISH_REASON_STOP, None)
            if isinstance(answer.end, Exception):
                raise answer.end
            if answer.end is not None:
                return self._outcome(answer.end.reason, answer.end)

    def _start_prefill(
        self, start_token: int, parent: str
    ) -> asyncio.Task[prefill_pb2.EnqueueResponse]:
        request = self._request
        sampled = request.record.sampled
        prefill = self._prefills.prefill(
            self._call,
            start_token,
            parent,
            request.deadline,
            tenant=request.prepared.tenant,
            include_latency=sampled or request.prepared.includes_latency,
        )
        return asyncio.create_task(prefill)

    def _outcome(
        self,
        reason: sampling_pb2.FinishReason.ValueType,
        finished: decode_pb2.Finished | None,
    ) -> AttemptOutcome:
        cached = transferred = 0
        kept = None
        if finished is not None:
            cached, transferred = finished.cached_tokens, finished.transferred_tokens
            kept = kept_of(finished, self._call.incarnation, self._call.transfer_id)
        elif self._reserved is not None and self._call.remote_prefill:
            cached = self._reserved.start_token
            transferred = self._reserved.end_token - cached
        prompt_tokens = len(self._request.prepared.token_ids)
        return AttemptOutcome.of_prompt(reason, cached, transferred, prompt_tokens, kept)
