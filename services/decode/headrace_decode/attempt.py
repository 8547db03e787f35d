"""One attempt at one request on this worker, from admission to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final, Protocol, TypeAlias

from opentelemetry.trace import Span

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import receipt_pb2, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_ns
from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateTransfer,
    HeadraceError,
    InternalError,
    InvalidRequest,
    ProtocolViolation,
    TransferTimeout,
)
from headrace_common.tickets import TicketKey
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
from headrace_engine.proto import receipt_to_proto
from headrace_engine.receipts import RequestCost
from headrace_kv.messages import Reservation
from headrace_kv.prefix.events import Tier
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, TransferSummary

log = logging.getLogger(__name__)

# The transfer's deadline is this long before the request's, so that the error that names the
# missing keys still reaches the client.
ERROR_MARGIN_S = 0.5
ERROR_MARGIN_SHARE = 0.1
_CLOSE_TIMEOUT_S = 5.0


# It is never raised, so that all attempts share it.
_CALLER_LEFT: Final = Cancelled("the caller cancelled or disconnected")
OnEnd: TypeAlias = Callable[[Exception | None], None]
OnCost: TypeAlias = Callable[[receipt_pb2.Receipt], None]


class AttemptSink(Protocol):
    """Takes what an attempt has for its caller. Nothing follows `finish`, and nothing an error."""

    @property
    def token_count(self) -> int:
        """The tokens that it has got."""
        ...

    def reserve(self, reserved: decode_pb2.Reserved) -> None:
        """The blocks are reserved, and prefill may begin."""
        ...

    def add_first(self, tokens: DecodeTokens, times: decode_pb2.AttemptTimes | None) -> None:
        """Tokens of the first step, or with logprobs. `times` come with the first ones of either kind.

        The kinds are those from a hidden state, and those from KV.
        """
        ...

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """All other tokens."""
        ...

    def finish(self, finished: decode_pb2.Finished) -> None:
        """The answer has ended."""
        ...


@dataclass(eq=False, slots=True)
class DecodeAttempt:
    """Owns all resources of one attempt, and runs it for one caller.

    That calls `start`, and `end` in any case. `error` is the result; None once the attempt has reached its end. It is
    the engine's AnswerSink.
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
    on_arrived: Callable[[DecodeAttempt], None]
    """Called when its KV has arrived."""
    on_end: Callable[[DecodeAttempt], None]
    """Called once. It must call `close`."""
    signer: TicketKey | None = None
    """See HandoffTickets."""
    _on_cost: OnCost | None = field(default=None, init=False)
    error: HeadraceError | None = field(default=_CALLER_LEFT, init=False)
    reservation: Reservation | None = field(default=None, init=False)
    cached_tokens: int = field(default=0, init=False)
    tier_tokens: Mapping[Tier, int] = field(default_factory=dict, init=False)
    add_tokens: Callable[[Sequence[int]], None] = field(init=False)
    """See AnswerSink."""
    _sink: AttemptSink = field(init=False)
    _report: OnEnd = field(init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _timer: asyncio.TimerHandle = field(init=False)
    _waiter: TransferWaiter | None = field(default=None, init=False)
    _over: bool = field(default=False, init=False)
    """Whether its caller has got the end or an error."""
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

    @property
    def generated_tokens(self) -> int:
        """The tokens that its caller has got."""
        return 0 if self._task is None else self._sink.token_count

    def start(
        self,
        sink: AttemptSink,
        on_end: OnEnd,
        on_cost: OnCost | None = None,
        *,
        early: bool = False,
    ) -> None:
        """Starts the engine's request. `sink` gets the reservation, tokens and the end, each at once.

        `on_end` is called once, with the error if any. The deadline counts as an error. `on_cost` gets the receipt if
        the attempt is ended before the engine has ended it. With `early`, prefill may begin, and open the transfer,
        before the blocks are reserved.
        """
        self._sink, self._report, self._on_cost = sink, on_end, on_cost
        self.add_tokens = self._add_early_tokens
        name = self.work.transfer_id
        if not self.work.remote_kv:
            self.timestamps.blocks_reserved()
            sink.reserve(decode_pb2.Reserved())
        elif early:
            self.receiver.expect(name)
            end_token = self.work.transferable_tokens
            sink.reserve(decode_pb2.Reserved(end_token=end_token, admitted=True))
        self._task = asyncio.create_task(self.engine.decode(self.work, self), name=f"answer {name}")
        self._task.add_done_callback(self._engine_ended)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            self.deadline.remaining_s(), lambda: self._fail(DeadlineExceeded.waiting_for("engine"))
        )

    def put(self, event: DecodeEvent) -> None:
        """See AnswerSink."""
        if isinstance(event, RequestCost) and self._on_cost is not None:
            self._on_cost(receipt_to_proto(event, self.engine.descriptor, self.cached_tokens))
        if self._over:
            return
        try:
            match event:
                case DecodeTokens():
                    self._sink.add_first(event, self._times_of(event))
                case DecodeEnded():
                    self._sink.finish(self._finished(event))
                    self._stop()
                    self._report(None)
                case Reservation():
                    self._sink.reserve(self._reserve(event))
        except Exception as error:  # noqa: BLE001 - the engine and its other requests go on
            self._fail(error)

    def _add_early_tokens(self, token_ids: Sequence[int]) -> None:
        """Tokens of an engine that has put none."""
        self.put(DecodeTokens(tuple(token_ids)))

    def set_first_token(self, token_id: int) -> None:
        """Gives the engine the answer's first token, which a prefill worker has chosen.

        Raises DuplicateTransfer the second time. Raises InvalidRequest for a token that ends the
        answer, or before the reservation, and ProtocolViolation for one beyond the vocabulary.
        """
        work = self.work
        if self.reservation is None:
            raise InvalidRequest({"transfer_id": "has no blocks yet: wait for Reserved"})
        if self.timestamps.steps.token_received_us:
            raise DuplicateTransfer(
                f"transfer {work.transfer_id} has its first token already",
                metadata={"transfer_id": work.transfer_id},
            )
        if token_id >= self.engine.vocabulary_size:
            raise ProtocolViolation(
                f"prefill chose token {token_id}, and the vocabulary has {self.engine.vocabulary_size}"
            )
        room = min(work.sampling.max_tokens, self.engine.max_model_len - len(work.token_ids))
        if token_id in work.sampling.stop_token_ids or room < 2:
            raise InvalidRequest({"token_id": "ends the answer; cancel the attempt instead"})
        self.timestamps.token_received()
        self.engine.transfer_event(FirstToken(work.transfer_id, token_id))

    def interrupt(self, error: Exception) -> None:
        """Ends the stream with `error`, after what the engine has given."""
        if self._task is not None:
            self._fail(error)

    def _reserve(self, reservation: Reservation) -> decode_pb2.Reserved:
        """Opens the transfer into the engine's blocks."""
        if self.reservation is not None:
            raise InternalError("the engine reserved blocks twice")
        self.reservation = reservation
        self.timestamps.blocks_reserved()
        start_token, end_token = reservation.start_token, reservation.end_token
        if start_token < end_token:
            by_state = self.work.from_hidden_state
            transfer = self.receiver.reserve(
                reservation,
                transfer_deadline(self.deadline),
                self.on_transfer_free,
                hidden_format=self.engine.hidden_format if by_state else None,
                signer=self.signer,
            )
            arrived = partial(self.on_arrived, self)
            late = None
            if self.work.computes_from:
                name, why = reservation.transfer_id, "its layers were late"
                late = partial(self.receiver.cancel, name, TransferTimeout.reason, why)
            self._waiter = TransferWaiter(
                transfer, self.engine, self.timestamps, self._fail, by_state, arrived, late
            )
        else:
            self.receiver.cancel(reservation.transfer_id, Cancelled.reason, "no token is missing")
        return decode_pb2.Reserved(start_token=start_token, end_token=end_token)

    def _times_of(self, tokens: DecodeTokens) -> decode_pb2.AttemptTimes | None:
        """The times of this attempt with its first token of either kind, else None.

        Only one token, sampled from a hidden state, may come before the KV cache is complete (I3).
        """
        if self._from_kv:
            return None
        before, sampled = self.generated_tokens, self.work.from_hidden_state
        self._from_kv = before + len(tokens.token_ids) > (1 if sampled else 0)
        if self._from_kv:
            self._require_kv()
            self.add_tokens = self._sink.add_tokens
        self.timestamps.first_generated(
            sampled=sampled, from_kv=self._from_kv, step_start_ns=tokens.step_start_ns
        )
        return self.timestamps.steps if self._from_kv or not before else None

    def _require_kv(self) -> None:
        """Raises InternalError when the engine has used an incomplete KV cache (I3)."""
        if self.work.remote_kv and self.reservation is None:
            raise InternalError("the engine yielded another event before its reservation")
        if self._waiter is not None:
            self._waiter.require_complete()

    def _finished(self, ended: DecodeEnded) -> decode_pb2.Finished:
        if not self.work.from_hidden_state:
            self._require_kv()
        # The caller may disconnect as soon as it has read this.
        self.error = None
        self.timestamps.token_generated()
        self.cached_tokens = ended.cached_tokens
        self.tier_tokens = ended.tier_tokens
        finished = decode_pb2.Finished(
            reason=sampling_pb2.FINISH_REASON_STOP
            if ended.stopped
            else sampling_pb2.FINISH_REASON_LENGTH,
            cached_tokens=ended.cached_tokens,
            receipt=receipt_to_proto(
                ended.cost, self.engine.descriptor, ended.cached_tokens, ended.kept
            ),
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

    def _engine_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._over:
            return
        if not isinstance(error, Exception):
            name = self.work.transfer_id
            error = InternalError(f"the engine ended request {name} without a reason")
        self._fail(error)

    def _fail(self, failure: Exception) -> None:
        """The first error ends the engine's request. The transfer's own one is more precise than the engine's."""
        if self._over:
            return
        self._stop()
        if isinstance(failure, HeadraceError):
            transfer_error = self._waiter.error if self._waiter is not None else None
            failure = self.error = transfer_error or failure
        else:
            self.error = InternalError(f"{type(failure).__name__}: {failure}")
        if self._task is not None:
            self._task.cancel()
        self._report(failure)

    def _stop(self) -> None:
        """Nothing of the engine goes to the caller any more."""
        self._over, self.add_tokens = True, _ignore_tokens

    def end(self) -> None:
        """The caller reads no more. Repeats are ignored."""
        self._stop()
        if not self._ended:
            self._ended = True
            self.timestamps.ended()
            self.on_end(self)

    async def close(self) -> None:
        """Gives back all resources."""
        transfer_id = self.work.transfer_id
        if self._waiter is not None:
            await self._waiter.stop()
        if self.work.remote_kv and self.summary is None:
            error = self.error or Cancelled("the request has ended")
            self.receiver.cancel(transfer_id, error.reason, error.detail)
        await self._abort()
        held = self.reservation
        if self._waiter is not None:
            await self._waiter.wait_ended()
        elif self.work.remote_kv and (held is None or held.start_token < held.end_token):
            # No transfer was opened for the blocks.
            self.engine.transfer_event(Released(transfer_id))

    async def _abort(self) -> None:
        """Ends the engine's request."""
        if self._task is None:
            return
        self._timer.cancel()
        if not self._task.cancel():
            return
        with suppress(asyncio.CancelledError):
            await asyncio.wait({self._task}, timeout=_CLOSE_TIMEOUT_S)
        if not self._task.done():
            log.error("the engine did not abort %s within its time", self.work.transfer_id)


def _ignore_tokens(_: Sequence[int]) -> None:
    """Those that an engine gives until it has noticed the end."""


def transfer_deadline(deadline: Deadline) -> Deadline:
    """The transfer's deadline: early enough to report missing keys before the request's."""
    margin_s = min(ERROR_MARGIN_S, ERROR_MARGIN_SHARE * deadline.remaining_s())
    return Deadline(deadline.monotonic_s - margin_s)
