"""Fetches the KV of prompts' first tokens from the decode workers that hold it, instead of computing it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc.aio

from headrace.kv.v1 import prefix_pb2, prefix_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import Cancelled, HeadraceError, NotFound, QueueFull
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tasks import end_task
from headrace_engine.interface import Engine
from headrace_kv.handoff.messages import Reservation, TransferTarget
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.receive.receiver import IncomingTransfer, Receiver
from headrace_prefill.prefix_policy import FetchPolicy
from headrace_prefill.prefix_tickets import PrefixTickets

_LOG = logging.getLogger(__name__)

_CHANNELS_MAX: Final = 256
# The answer follows the last layer. Without it, the call is cancelled.
_ANSWER_WAIT_S: Final = 0.5
_END_WAIT_S: Final = 5.0
# The link has no part in these.
_HARMLESS: Final = (Cancelled, NotFound, QueueFull)


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """A fetch that has ended. `reason` is an error's, or ""."""

    token_count: int
    payload_bytes: int
    reason: str
    start_unix_ns: int
    end_unix_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchContext:
    """What the fetches of one prefill worker share. A fetch that takes longer than `timeout_s` has failed."""

    ref: WorkerRef
    engine: Engine
    receiver: Receiver
    tickets: PrefixTickets
    policy: FetchPolicy
    timeout_s: float
    on_ended: Callable[[FetchRecord], None]


class PrefixFetcher:
    """Offers each task a fetch, and owns the channels to decode workers."""

    def __init__(
        self, context: FetchContext, open_channel: Callable[[str], grpc.aio.Channel]
    ) -> None:
        self._context = context
        self._open_channel = open_channel
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def offer(self, target: TransferTarget) -> PrefixFetch | None:
        """The fetch of what decode has of a task's tokens. None when it has too little, or fetching is not worth it."""
        policy = self._context.policy
        if not target.ticket or not policy.prefers_fetch(target.decode, target.start_token):
            return None
        return PrefixFetch(self._context, target, self._channel)

    def computed(self, token_count: int, seconds: float) -> None:
        """A task's tokens were computed."""
        self._context.policy.computed(token_count, seconds)

    async def close(self) -> None:
        """Closes every channel."""
        while self._channels:
            _, channel = self._channels.popitem()
            self._close(channel)
        while self._closing:
            await asyncio.wait(set(self._closing))

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = self._open_channel(endpoint)
        self._channels.move_to_end(endpoint)
        if len(self._channels) > _CHANNELS_MAX:
            _, oldest = self._channels.popitem(last=False)
            self._close(oldest)
        return channel

    def _close(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class PrefixFetch:
    """The fetch for one task: a PrefixSource for the engine. Any failure of it costs time only."""

    def __init__(
        self,
        context: FetchContext,
        target: TransferTarget,
        channel_of: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self.record: FetchRecord | None = None
        self._context = context
        self._target = target
        self._channel_of = channel_of
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def end_token(self) -> int:
        """See PrefixSource."""
        return self._target.start_token

    @property
    def least_tokens(self) -> int:
        """See PrefixSource."""
        return self._context.policy.min_tokens

    def start(self, reservation: Reservation) -> bool:
        """See PrefixSource."""
        context, target = self._context, self._target
        token_count = reservation.end_token - reservation.start_token
        if self._closed or not context.policy.prefers_fetch(target.decode, token_count):
            return False
        deadline = Deadline(min(target.deadline_s, time.monotonic() + context.timeout_s))
        context.tickets.expect(target.transfer_id, target.decode, target.ticket)
        try:
            transfer = context.receiver.reserve(reservation, deadline)
        except HeadraceError as error:
            context.tickets.forget(target.transfer_id)
            _LOG.warning("the prefix of %s is computed: %s", target.transfer_id, error.detail)
            return False
        self._running = asyncio.create_task(
            self._run(transfer), name=f"prefix of {target.transfer_id}"
        )
        return True

    async def close(self) -> None:
        """Ends the fetch, because its task has ended. Reports the end to the engine before it returns."""
        self._closed = True
        if self._running is None or self._running.done():
            return
        name = self._target.transfer_id
        self._context.receiver.cancel(name, Cancelled.reason, "the prefill task has ended")
        _, late = await asyncio.wait({self._running}, timeout=_END_WAIT_S)
        if late:
            _LOG.error("the fetch of the prefix of %s did not end in time", name)

    async def _run(self, transfer: IncomingTransfer) -> None:
        context, name = self._context, self._target.transfer_id
        start_unix_ns, start_s = time.time_ns(), time.monotonic()
        asking = asyncio.create_task(self._ask(transfer))
        error: HeadraceError | None = None
        payload_bytes = 0
        try:
            payload_bytes = await self._wait_arrival(transfer, asking)
        except HeadraceError as failure:
            error = failure
            self._report_failure(failure)
            context.engine.recompute(name)
        else:
            token_count = transfer.reservation.end_token - transfer.reservation.start_token
            context.engine.arrived(name)
            context.policy.fetched(self._target.decode, token_count, time.monotonic() - start_s)
            await asyncio.wait({asking}, timeout=_ANSWER_WAIT_S)
        finally:
            await end_task(asking)
            context.tickets.forget(name)
        self._ended(transfer.reservation, payload_bytes, error, start_unix_ns)

    async def _wait_arrival(
        self, transfer: IncomingTransfer, asking: asyncio.Task[HeadraceError | None]
    ) -> int:
        """The bytes of the complete transfer. Raises the refusal of the decode worker, or the transfer's failure."""
        arrival = asyncio.create_task(transfer.wait())
        await asyncio.wait({asking, arrival}, return_when=asyncio.FIRST_COMPLETED)
        refusal = None if arrival.done() else asking.result()
        if refusal is not None:
            self._context.receiver.cancel(transfer.transfer_id, refusal.reason, refusal.detail)
        try:
            return (await arrival).payload_bytes
        except HeadraceError as failure:
            raise refusal or failure from None

    async def _ask(self, transfer: IncomingTransfer) -> HeadraceError | None:
        """Has the decode worker send. Returns its refusal, or None when it has sent everything."""
        target, reservation = self._target, transfer.reservation
        stub = prefix_pb2_grpc.PrefixServiceStub(self._channel_of(target.handoff_endpoint))
        request = prefix_pb2.SendPrefixRequest(
            transfer_id=target.transfer_id,
            worker_id=self._context.ref.worker_id,
            incarnation=self._context.ref.incarnation,
            ticket=target.ticket,
            start_token=reservation.start_token,
            end_token=reservation.end_token,
        )
        try:
            await stub.SendPrefix(request, timeout=transfer.deadline.remaining_s())
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        return None

    def _report_failure(self, failure: HeadraceError) -> None:
        if self._closed:
            return
        name, decode = self._target.transfer_id, self._target.decode
        _LOG.warning("the prefix of %s is computed: %s", name, failure.detail)
        if not isinstance(failure, _HARMLESS):
            self._context.policy.failed(decode)

    def _ended(
        self,
        reservation: Reservation,
        payload_bytes: int,
        error: HeadraceError | None,
        start_unix_ns: int,
    ) -> None:
        self.record = FetchRecord(
            token_count=reservation.end_token - reservation.start_token,
            payload_bytes=payload_bytes,
            reason="" if error is None else error.reason,
            start_unix_ns=start_unix_ns,
            end_unix_ns=time.time_ns(),
        )
        self._context.on_ended(self.record)
