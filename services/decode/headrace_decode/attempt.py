"""One attempt at one request on this worker, from admission to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Protocol

from opentelemetry.trace import Span

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_ns
from headrace_common.errors import (
    Cancelled,
    DuplicateTransfer,
    HeadraceError,
    InternalError,
    InvalidRequest,
)
from headrace_common.tickets import TicketKey
from headrace_decode.engine_events import EngineEvents
from headrace_decode.proto import kept_to_proto
from headrace_decode.timestamps import RequestTimestamps
from headrace_decode.transfer_waiter import TransferWaiter
from headrace_engine.interface import (
    DecodeEnded,
    DecodeEvent,
    DecodeTokens,
    DecodeWork,
    Engine,
    FirstToken,
    Released,
)
from headrace_kv.messages import Reservation
from headrace_kv.prefix.events import Tier
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, TransferSummary

log = logging.getLogger(__name__)

# The transfer's deadline is this long before the request's, so that the error that names the
# missing keys still reaches the client.
ERROR_MARGIN_S = 0.5
ERROR_MARGIN_SHARE = 0.1


class AttemptSink(Protocol):
    """Takes what an attempt generates."""

    def add_tokens(self, tokens: DecodeTokens, times: decode_pb2.AttemptTimes | None) -> None:
        """New tokens. `times` come with the first one that was sampled from a hidden state, and the first from KV."""
        ...

    def finish(self, finished: decode_pb2.Finished) -> None:
        """The answer has ended."""
        ...


@dataclass(eq=False, slots=True)
class DecodeAttempt:
    """Owns all resources of one attempt, and runs it for one caller.

    That calls `reserve` and `wait_ready`. Then a link calls `forward`, and the HTTP API calls `read`. Both call `end`
    in any case. `error` is the result; None once the attempt has reached its end.
    """

    work: DecodeWork
    _: KW_ONLY
    engine: Engine
    receiver: Receiver
    deadline: Deadline
    timestamps: RequestTimestamps
    span: Span
    on_transfer_free: Callable[[IncomingTransfer], None]
    """Called when the transfer's blocks are free."""
    on_end: Callable[[DecodeAttempt], None]
    """Called once. It must call `close`."""
    signer: TicketKey | None = None
    """See HandoffTickets."""
    error: HeadraceError | None = field(
        default_factory=lambda: Cancelled("the caller cancelled or disconnected"), init=False
    )
    reservation: Reservation | None = field(default=None, init=False)
    generated_tokens: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    tier_tokens: Mapping[Tier, int] = field(default_factory=dict, init=False)
    _events: EngineEvents | None = field(default=None, init=False)
    _waiter: TransferWaiter | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)
    _from_kv: bool = field(default=False, init=False)
    """Whether a token was computed from KV."""

    @property
    def awaits_kv(self) -> bool:
        """Whether a transfer was opened for it."""
        return self._waiter is not None

    @property
    def summary(self) -> TransferSummary | None:
        """The summary of its transfer, once that is complete."""
        return self._waiter.summary if self._waiter is not None else None

    def expect_prefill(self) -> decode_pb2.Reserved:
        """Lets prefill begin, and open the transfer, before the blocks are reserved. Comes before `reserve`."""
        self.receiver.expect(self.work.transfer_id)
        return decode_pb2.Reserved(end_token=self.work.transferable_tokens, admitted=True)

    async def reserve(self) -> decode_pb2.Reserved:
        """Starts the engine's request, and returns once it has its blocks. Raises HeadraceError."""
        with self._recorded():
            name = f"request {self.work.transfer_id}"
            self._events = EngineEvents(partial(self.engine.decode, self.work), name)
            if not self.work.remote_kv:
                self.timestamps.blocks_reserved()
                return decode_pb2.Reserved()
            reservation = await self._reserve(self._events)
            return decode_pb2.Reserved(
                start_token=reservation.start_token, end_token=reservation.end_token
            )

    async def wait_ready(self) -> None:
        """Returns once the engine may generate: with the KV cache, or before it if it begins with a hidden state.

        Follows `reserve`. Raises HeadraceError.
        """
        if self._waiter is None:
            return
        with self._recorded():
            if self.work.from_hidden_state:
                self._waiter.start_forwarding(self._engine_events)
            else:
                await self._waiter.wait_complete(self._engine_events, self.deadline)

    def forward(self, sink: AttemptSink, on_end: Callable[[Exception | None], None]) -> None:
        """From now on `sink` gets what the engine generates, at once. `on_end` is called once, with the error if any.

        The deadline counts as an error.
        """

        def put(event: DecodeEvent) -> None:
            if isinstance(event, DecodeTokens):
                sink.add_tokens(event, self._count(event))
            else:
                sink.finish(self._finished(event))
                on_end(None)

        def fail(error: Exception) -> None:
            on_end(self._recorded_error(error))

        self._engine_events.forward(put, fail, self.deadline)

    async def read(self) -> DecodeTokens | decode_pb2.Finished:
        """The next tokens, or the end. Raises HeadraceError."""
        with self._recorded():
            event = await self._engine_events.read(self.deadline)
            if not isinstance(event, DecodeTokens):
                return self._finished(event)
            self._count(event)
            return event

    def set_first_token(self, token_id: int) -> None:
        """Gives the engine the answer's first token, which a prefill worker has chosen.

        Raises DuplicateTransfer the second time. Raises InvalidRequest for a token that ends the
        answer, or before the reservation.
        """
        work = self.work
        if self.reservation is None:
            raise InvalidRequest({"transfer_id": "has no blocks yet: wait for Reserved"})
        if self.timestamps.steps.token_received_us:
            raise DuplicateTransfer(
                f"transfer {work.transfer_id} has its first token already",
                metadata={"transfer_id": work.transfer_id},
            )
        room = min(work.sampling.max_tokens, self.engine.max_model_len - len(work.token_ids))
        if token_id in work.sampling.stop_token_ids or room < 2:
            raise InvalidRequest({"token_id": "ends the answer; cancel the attempt instead"})
        self.timestamps.token_received()
        self.engine.transfer_event(FirstToken(work.transfer_id, token_id))

    def interrupt(self, error: HeadraceError) -> None:
        """Ends the stream with `error`, after the events that the engine has yielded."""
        if self._events is not None:
            self._events.interrupt(error)

    async def _reserve(self, events: EngineEvents) -> Reservation:
        """Waits for the engine's blocks and opens the transfer into them."""
        first = await events.read(self.deadline)
        if not isinstance(first, Reservation):
            raise InternalError("the engine yielded another event before its reservation")
        self.reservation = first
        self.timestamps.blocks_reserved()
        if first.start_token < first.end_token:
            transfer = self.receiver.reserve(
                first,
                transfer_deadline(self.deadline),
                self.on_transfer_free,
                hidden_format=self.engine.hidden_format if self.work.from_hidden_state else None,
                signer=self.signer,
            )
            self._waiter = TransferWaiter(transfer, self.engine, self.timestamps)
        else:
            self.receiver.cancel(first.transfer_id, Cancelled.reason, "no token is missing")
        return first

    @property
    def _engine_events(self) -> EngineEvents:
        assert self._events is not None, "the attempt was not started"
        return self._events

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        try:
            yield
        except Exception as failure:
            error = self._recorded_error(failure)
            if error is not failure:
                raise error from None
            raise

    def _recorded_error(self, failure: Exception) -> Exception:
        """Keeps the error that ends the attempt, and returns what its caller gets.

        The transfer's own error is more precise than the engine's.
        """
        if not isinstance(failure, HeadraceError):
            self.error = InternalError(f"{type(failure).__name__}: {failure}")
            return failure
        waiter = self._waiter if self.work.from_hidden_state else None
        self.error = (waiter.error if waiter is not None else None) or failure
        return self.error

    def _count(self, tokens: DecodeTokens) -> decode_pb2.AttemptTimes | None:
        """Counts new tokens. Returns the times of this attempt with the first one of either kind.

        Only one token, sampled from a hidden state, may come before the KV cache is complete (I3).
        """
        before = self.generated_tokens
        self.generated_tokens += len(tokens.token_ids)
        if self._from_kv:
            self.timestamps.token_generated()
            return None
        sampled = self.work.from_hidden_state
        self._from_kv = self.generated_tokens > (1 if sampled else 0)
        if self._from_kv and self._waiter is not None and self._waiter.summary is None:
            self._waiter.require_complete()
        self.timestamps.first_generated(
            sampled=sampled, from_kv=self._from_kv, step_start_ns=tokens.step_start_ns
        )
        return self.timestamps.to_proto() if self._from_kv or not before else None

    def _finished(self, ended: DecodeEvent) -> decode_pb2.Finished:
        if not isinstance(ended, DecodeEnded):
            raise InternalError("the engine reserved blocks twice")
        # The caller may disconnect as soon as it has read this.
        self.error = None
        self.cached_tokens = ended.cached_tokens
        self.tier_tokens = ended.tier_tokens
        finished = decode_pb2.Finished(
            reason=sampling_pb2.FINISH_REASON_STOP
            if ended.stopped
            else sampling_pb2.FINISH_REASON_LENGTH,
            cached_tokens=ended.cached_tokens,
        )
        if self.work.keep is not None:
            finished.kept.CopyFrom(kept_to_proto(ended.kept))
        if self.reservation is not None and (
            self.summary is not None or not self.work.from_hidden_state
        ):
            finished.transferred_tokens = self.reservation.end_token - self.reservation.start_token
        if self.summary is not None:
            finished.acknowledgement_count = self.summary.acknowledgement_count
            finished.payload_bytes = self.summary.payload_bytes
            steps = self.timestamps.steps
            waited_us = steps.kv_arrived_us - steps.reserved_us
            finished.transfer_wait.CopyFrom(duration_from_ns(1_000 * waited_us))
        return finished

    def end(self) -> None:
        """The caller reads no more. Repeats are ignored."""
        if not self._ended:
            self._ended = True
            self.timestamps.ended()
            self.on_end(self)

    async def close(self) -> None:
        """Gives back all resources."""
        transfer_id = self.work.transfer_id
        error = self.error or Cancelled("the request has ended")
        if self._waiter is not None:
            await self._waiter.stop_forwarding()
        if self.work.remote_kv and self.summary is None:
            self.receiver.cancel(transfer_id, error.reason, error.detail)
        if self._events is not None and not await self._events.close():
            log.error("the engine did not abort %s within its time", transfer_id)
        held = self.reservation
        if self._waiter is not None:
            await self._waiter.wait_ended()
        elif self.work.remote_kv and (held is None or held.start_token < held.end_token):
            # No transfer was opened for the blocks.
            self.engine.transfer_event(Released(transfer_id))


def transfer_deadline(deadline: Deadline) -> Deadline:
    """The transfer's deadline: early enough to report missing keys before the request's."""
    margin_s = min(ERROR_MARGIN_S, ERROR_MARGIN_SHARE * deadline.remaining_s())
    return Deadline(deadline.monotonic_s - margin_s)
