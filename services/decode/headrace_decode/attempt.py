"""One attempt at one request on this worker, from admission to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable

from google.protobuf import duration_pb2

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    DuplicateTransfer,
    HeadraceError,
    InternalError,
    InvalidRequest,
)
from headrace_common.process.pacing import LoopLoad
from headrace_decode.event_buffer import EventBuffer
from headrace_decode.proto import tokens_to_proto
from headrace_decode.timestamps import RequestTimestamps
from headrace_decode.transfer_waiter import TransferWaiter
from headrace_engine.interface import DecodeEnded, DecodeEvent, DecodeTokens, DecodeWork, Engine
from headrace_kv.handoff.messages import Reservation
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, TransferSummary

log = logging.getLogger(__name__)

# The transfer's own deadline ends this long before the request's, so that the client still hears
# which keys are missing.
TELL_MARGIN_S = 0.5
TELL_MARGIN_SHARE = 0.1


class Attempt:
    """Owns everything that one attempt holds, and gives all of it back in `close`."""

    def __init__(
        self,
        work: DecodeWork,
        *,
        engine: Engine,
        receiver: Receiver,
        deadline: Deadline,
        on_settled: Callable[[], None],
        load: LoopLoad | None = None,
    ) -> None:
        """`on_transfer_free` may be set before the first response: it is told when the transfer's blocks are free."""
        self.work = work
        self.milestones = RequestTimestamps(start_unix_ns=time.time_ns())
        self.reservation: Reservation | None = None
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.on_transfer_free: Callable[[IncomingTransfer], None] | None = None
        self._engine = engine
        self._receiver = receiver
        self._deadline = deadline
        self._on_settled = on_settled
        self._load = load
        self._events: EventBuffer | None = None
        self._intake: TransferWaiter | None = None
        self._closed = False

    @property
    def awaits_kv(self) -> bool:
        """Whether a transfer was opened for it."""
        return self._intake is not None

    @property
    def summary(self) -> TransferSummary | None:
        """What came, once it is whole."""
        return self._intake.summary if self._intake is not None else None

    async def responses(self) -> AsyncIterator[decode_pb2.GenerateResponse]:
        """The attempt's stream. Raises HeadraceError; `close` must be called afterwards whatever
        happened.
        """
        transfer_id = self.work.transfer_id
        self._events = EventBuffer(
            self._engine.decode(self.work), f"request {transfer_id}", self._load
        )
        if self.work.remote_kv:
            reservation = await self._reserve(self._events)
            yield decode_pb2.GenerateResponse(
                reserved=decode_pb2.Reserved(
                    start_token=reservation.start_token, end_token=reservation.end_token
                )
            )
            if self._intake is not None:
                if self.work.from_logits:
                    self._intake.pass_on(self._events)
                else:
                    await self._intake.wait_whole(self._events, self._deadline)
        else:
            self.milestones.reserved_unix_ns = time.time_ns()
            yield decode_pb2.GenerateResponse(reserved=decode_pb2.Reserved())
        while True:
            tokens, ended = self._take(await self._next_events(self._events))
            if tokens:
                yield decode_pb2.GenerateResponse(tokens=tokens_to_proto(tokens))
            if ended is not None:
                yield decode_pb2.GenerateResponse(finished=self._finished(ended))
                return

    def set_first_token(self, token_id: int) -> None:
        """The answer's first token, which the caller has from a prefill worker.

        Raises DuplicateTransfer the second time, and InvalidRequest for one that ends the answer or comes before the
        reservation.
        """
        work = self.work
        if self.reservation is None:
            raise InvalidRequest({"transfer_id": "has no blocks yet: wait for Reserved"})
        if self.milestones.told_unix_ns:
            raise DuplicateTransfer(
                f"transfer {work.transfer_id} has its first token already",
                metadata={"transfer_id": work.transfer_id},
            )
        room = min(work.sampling.max_tokens, self._engine.max_model_len - len(work.token_ids))
        if token_id in work.sampling.stop_token_ids or room < 2:
            raise InvalidRequest({"token_id": "ends the answer; give the attempt up instead"})
        self.milestones.told_unix_ns = time.time_ns()
        self._engine.first_token(work.transfer_id, token_id)

    def interrupt(self, error: HeadraceError) -> None:
        """Ends the stream with `error`, after what the engine has said already."""
        if self._events is not None:
            self._events.interrupt(error)

    async def _reserve(self, events: EventBuffer) -> Reservation:
        """Waits for the engine's blocks and opens the transfer into them."""
        first = await events.take_first(self._deadline)
        if not isinstance(first, Reservation):
            raise InternalError("the engine spoke before it had reserved blocks")
        self.reservation = first
        self.milestones.reserved_unix_ns = time.time_ns()
        if first.start_token < first.end_token:
            transfer = self._receiver.reserve(
                first,
                transfer_deadline(self._deadline),
                self.on_transfer_free,
                self._engine.arrival_listener(),
                logits_bytes=self._engine.logits_bytes if self.work.from_logits else 0,
            )
            self._intake = TransferWaiter(transfer, self._engine, self.milestones)
        return first

    async def _next_events(self, events: EventBuffer) -> list[DecodeEvent]:
        try:
            return await events.take(self._deadline)
        except HeadraceError:
            # An engine that hears of the failed transfer first says less about it.
            if self.work.from_logits and self._intake is not None and self._intake.error:
                raise self._intake.error from None
            raise

    def _take(self, events: list[DecodeEvent]) -> tuple[list[DecodeTokens], DecodeEnded | None]:
        tokens: list[DecodeTokens] = []
        ended: DecodeEnded | None = None
        for event in events:
            if isinstance(event, DecodeTokens):
                tokens.append(event)
            elif isinstance(event, DecodeEnded):
                ended = event
            else:
                raise InternalError("the engine reserved blocks twice")
        if tokens:
            now, times = time.time_ns(), self.milestones
            self.generated_tokens += sum(len(piece.token_ids) for piece in tokens)
            if self.work.from_logits:
                times.sampled_unix_ns = times.sampled_unix_ns or now
            if self.generated_tokens > (1 if self.work.from_logits else 0):
                if self._intake is not None:
                    self._intake.require_whole()
                times.first_token_unix_ns = times.first_token_unix_ns or now
            times.last_token_unix_ns = now
        return tokens, ended

    def _finished(self, ended: DecodeEnded) -> decode_pb2.Finished:
        self.cached_tokens = ended.cached_tokens
        finished = decode_pb2.Finished(
            reason=sampling_pb2.FINISH_REASON_STOP
            if ended.stopped
            else sampling_pb2.FINISH_REASON_LENGTH,
            cached_tokens=ended.cached_tokens,
        )
        if self.reservation is not None and (self.summary is not None or not self.work.from_logits):
            finished.transferred_tokens = self.reservation.end_token - self.reservation.start_token
        if self.summary is not None:
            finished.acknowledgement_count = self.summary.acknowledgement_count
            finished.payload_bytes = self.summary.payload_bytes
            waited_ns = self.milestones.arrived_unix_ns - self.milestones.reserved_unix_ns
            finished.transfer_wait.CopyFrom(
                duration_pb2.Duration(seconds=waited_ns // 10**9, nanos=waited_ns % 10**9)
            )
        return finished

    def begin_close(self) -> bool:
        """True for the first caller, who must call `close`."""
        first, self._closed = not self._closed, True
        if first:
            self.milestones.end_unix_ns = time.time_ns()
        return first

    async def close(self, error: HeadraceError | None) -> None:
        """Gives back whatever the attempt holds; `error` says why when it did not end by itself."""
        transfer_id = self.work.transfer_id
        reason = "CANCELLED" if error is None else error.reason
        detail = "the request has ended" if error is None else error.detail
        try:
            if self._intake is not None:
                await self._intake.stop_passing()
                if self._intake.summary is None:
                    self._receiver.cancel(transfer_id, reason, detail)
            if self._events is not None and not await self._events.close():
                log.error("the engine did not abort %s within its time", transfer_id)
            if self._intake is not None:
                await self._intake.settle()
            elif self.work.remote_kv:
                self._give_back_blocks()
        finally:
            self._on_settled()

    def _give_back_blocks(self) -> None:
        """Tells the engine about blocks that the receiver was never told of."""
        reserved = self.reservation
        if reserved is None or reserved.start_token < reserved.end_token:
            self._engine.released(self.work.transfer_id)


def transfer_deadline(deadline: Deadline) -> Deadline:
    """The transfer's end: early enough to tell the client which keys are missing."""
    margin_s = min(TELL_MARGIN_S, TELL_MARGIN_SHARE * deadline.remaining_s())
    return Deadline(deadline.unix_s - margin_s)
