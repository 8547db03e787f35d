"""One attempt at a request of this worker's own client."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, TypeAlias

from opentelemetry import context as otel_context
from opentelemetry import trace

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import ProtocolViolation
from headrace_common.identity import new_transfer_id
from headrace_common.rpc.trace_context import traceparent
from headrace_decode.attempt import AttemptEvent, DecodeAttempt
from headrace_decode.http.attempt_timeline import OwnAttemptTimeline
from headrace_decode.http.prefill import RouterPrefills
from headrace_decode.http.room import RoomQueue
from headrace_frontend.promises import kept_of
from headrace_frontend.request.validation import decode_request
from headrace_frontend.running.completion import AdmittedRequest, AttemptOutcome

OwnRequest: TypeAlias = AdmittedRequest[OwnAttemptTimeline]


class OwnAttempt:
    """Adds the tokens of one attempt to the response. Runs once."""

    def __init__(
        self,
        request: OwnRequest,
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
        self._reserved: decode_pb2.Reserved | None = None
        self._prefill: asyncio.Task[prefill_pb2.EnqueueResponse] | None = None
        self._timeline: OwnAttemptTimeline | None = None

    @property
    def reserved(self) -> bool:
        """Whether the engine has reserved blocks."""
        return self._reserved is not None

    async def run(self) -> AttemptOutcome:
        """Raises HeadraceError. Cancellation gives back the blocks and cancels the prefill."""
        request = self._request
        token = otel_context.attach(trace.set_span_in_context(request.root))
        try:
            running = await self._room.start(self._call, request.deadline, request.slot_wait_s())
        finally:
            otel_context.detach(token)
        if not request.timeline.attempts:
            request.timeline.slot_acquired()
        self._timeline = request.timeline.attempt_started(OwnAttemptTimeline(running.timestamps))
        ended = False
        try:
            outcome = await self._add_tokens(running)
            ended = True
            return outcome
        finally:
            running.end()
            # After the end, the router's response is on its way.
            if self._prefill is not None and not ended:
                self._prefill.cancel()

    async def _add_tokens(self, running: DecodeAttempt) -> AttemptOutcome:
        response = self._request.response
        async with aclosing(running.events()) as events:
            first = await anext(events)
            if not isinstance(first, decode_pb2.Reserved):
                raise ProtocolViolation("the engine began without a reservation")
            self._reserved = first
            self._ask_for_prefill(first, traceparent(running.span))
            event = await self._first_event(asyncio.ensure_future(anext(events)))
            while not isinstance(event, decode_pb2.Finished):
                if isinstance(event, decode_pb2.Tokens):
                    await response.add_tokens(event)
                if response.stopped:
                    return self._outcome(sampling_pb2.FINISH_REASON_STOP, None)
                event = await anext(events)
            return self._outcome(event.reason, event)

    def _ask_for_prefill(self, reserved: decode_pb2.Reserved, parent: str) -> None:
        if reserved.start_token < reserved.end_token:
            self._prefill = asyncio.create_task(
                self._prefills.prefill(
                    self._call,
                    reserved.start_token,
                    parent,
                    self._request.deadline,
                    tenant=self._request.prepared.tenant,
                    include_latency=self._times_wanted,
                )
            )
            if self._timeline is not None:
                self._timeline.asked(self._prefill)
            # An error after the first token is of no interest: the engine has the KV cache.
            self._prefill.add_done_callback(_consume)

    async def _first_event(self, read: asyncio.Future[AttemptEvent]) -> AttemptEvent:
        """The first tokens or the end. Raises the error of a prefill that fails before them."""
        try:
            if self._prefill is not None:
                either: set[asyncio.Future[Any]] = {read, self._prefill}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    self._prefill.result()
            return await read
        except StopAsyncIteration:
            raise ProtocolViolation("the engine ended without tokens and without an end") from None
        finally:
            if not read.done():
                read.cancel()
                await asyncio.wait({read})

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

    @property
    def _times_wanted(self) -> bool:
        """Whether the steps of the prefill are of use."""
        sampled = self._request.root.get_span_context().trace_flags.sampled
        return sampled or self._request.prepared.includes_latency

    @property
    def prefill_worker_id(self) -> str:
        """The prefill worker, once the router has reported it. Empty for a local prefill."""
        task = self._prefill
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return ""
        return task.result().worker_id


def _consume(task: asyncio.Task[prefill_pb2.EnqueueResponse]) -> None:
    if not task.cancelled():
        task.exception()
