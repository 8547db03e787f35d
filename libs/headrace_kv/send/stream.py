"""The prefill side of a handoff stream: handshake, lease, messages in both directions, and what all streams share."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc.aio

from headrace.kv.v1 import handoff_pb2, handoff_pb2_grpc
from headrace_common.access.credentials import Credentials
from headrace_common.deadlines import Deadline
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import (
    Cancelled,
    Draining,
    HeadraceError,
    InternalError,
    PermissionDenied,
    ProtocolViolation,
    QueueFull,
    TransferFailed,
    Unauthenticated,
    WorkerGone,
    class_of,
)
from headrace_common.process.kill_timer import KillTimer
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_kv.checksum import DigestTerms
from headrace_kv.compatibility import require_compatible
from headrace_kv.hidden_state import HiddenFormat
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory, WorkerRef, layout_to_proto
from headrace_kv.leases import Clock, LateWriteGuard, WriteLease
from headrace_kv.messages import Reservation, SendReport, reservation_from_proto
from headrace_kv.transport.base import KvTransport

_log = logging.getLogger(__name__)

_LAYERS_PER_MESSAGE = 4096
_REQUESTS_PER_BATCH = 256
_OUTBOX_LIMIT = 262_144
_FLUSH_TIMEOUT_S = 2.0
# The longest wait of an acknowledgement for others. The message after a transfer's last one is sent at once.
_ACKNOWLEDGEMENT_WAIT_S = 0.001


DescriptorSource = Callable[[WorkerRef, Deadline], Awaitable[KvDescriptor]]
"""Finds the KV memory of a worker incarnation. Raises StaleIncarnation when that incarnation is gone."""


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Bounds of one rank's sender: open transfers, and layer ranges that wait, over all transfers.

    A device has `write_timeout_s` to write what was pushed.
    """

    transfers: int = 1024
    waiting_ranges: int = 65_536
    write_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderContext:
    """What a sender and its handoff streams share.

    `ref` is the prefill worker, `layout` its KV layout, `memory` the rank's part of it, registered with `transport`.
    `host_memory` has blocks of the same layout that the rank keeps below its KV memory, registered too.
    `hidden_format` is that of the model's hidden states, None where none are sent.
    The streams run on `event_loop` and present `credentials`. A handshake with a decode worker takes
    `handshake_timeout_s` at most. `on_quiet` is called once for each opened transfer, on the sender's thread, when
    nothing of the transfer is or will be written. `kill_timer` ends the process when it writes too late (I1).
    """

    ref: WorkerRef
    rank: int
    layout: KvLayout
    memory: RankMemory
    transport: KvTransport
    descriptors: DescriptorSource
    event_loop: asyncio.AbstractEventLoop
    on_quiet: Callable[[SendReport], None]
    handshake_timeout_s: float = 10.0
    credentials: Credentials = field(default_factory=Credentials)
    clock: Clock = field(default_factory=Clock)
    kill_timer: KillTimer | None = None
    host_memory: RankMemory | None = None
    hidden_format: HiddenFormat | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StreamReady:
    """The handshake is complete. Comes at most once for a stream, before its other events but StreamLost."""

    stream: HandoffStream
    descriptor: KvDescriptor
    digests: DigestTerms


@dataclass(frozen=True, slots=True, eq=False)
class ReservationReceived:
    """Decode answered an Open, with a message of `message_bytes`."""

    stream: HandoffStream
    reservation: Reservation
    message_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CancelReceived:
    """Decode cancelled a transfer."""

    stream: HandoffStream
    cancel: handoff_pb2.Cancel


@dataclass(frozen=True, slots=True, eq=False)
class StreamLost:
    """The stream has ended and its lease is revoked. Comes once for a started stream, as its last event."""

    stream: HandoffStream
    error: HeadraceError


StreamItem: TypeAlias = handoff_pb2.HandoffRequest | handoff_pb2.LayerDone
StreamEvent: TypeAlias = StreamReady | ReservationReceived | CancelReceived | StreamLost


def reason_from_peer(reason: str) -> str:
    """The reason to report on this rank when decode, or the stream to it, ended a transfer for `reason`.

    Draining and WorkerGone become TransferFailed: they describe the decode worker's state, not this rank's. So do the
    refusals of tickets: a client would take them for those of its own API key.
    """
    if class_of(reason) in (Draining, WorkerGone, Unauthenticated, PermissionDenied):
        return TransferFailed.reason
    return reason or Cancelled.reason


class HandoffStream:
    """One stream from one prefill rank to one incarnation of a decode worker.

    `start`, `send` and `close` may be called from any thread. Everything else, `post` included, runs on
    the context's event loop.
    """

    def __init__(
        self,
        context: SenderContext,
        decode: WorkerRef,
        endpoint: str,
        post: Callable[[StreamEvent], None],
    ) -> None:
        self.decode = decode
        self.lease = WriteLease.none()
        self.late_writes = LateWriteGuard(context.kill_timer)
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._context = context
        self._endpoint = endpoint
        self._post = post
        self._hello = handoff_pb2.Hello(
            worker_id=context.ref.worker_id,
            incarnation=context.ref.incarnation,
            rank=context.rank,
            layout=layout_to_proto(context.layout),
            decode_worker_id=decode.worker_id,
            decode_incarnation=decode.incarnation,
            hidden_format=context.hidden_format.to_proto() if context.hidden_format else None,
        )
        self._quarantine_s = 0.0
        self._outbox: deque[StreamItem] = deque()
        self._wake = asyncio.Event()
        self._wake_scheduled = False
        self._delayed_wake_scheduled = False
        self._delayed_wake: asyncio.TimerHandle | None = None
        self._closing = False
        self._handshake_complete = False
        self._overflow = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the handshake. StreamLost follows in any case."""
        if not self._schedule(self._start_task):
            self._report_lost(WorkerGone("the event loop of the handoff streams has ended"))

    def send(self, item: StreamItem) -> None:
        """Queues a message behind those that are queued already, and sends them all.

        A LayerDone waits for the next message, but not for long.
        """
        if len(self._outbox) >= _OUTBOX_LIMIT:
            self._overflow = True
        else:
            self._outbox.append(item)
        if self._wake_scheduled:
            return
        if not isinstance(item, handoff_pb2.LayerDone) or self._overflow:
            self._wake_scheduled = True
            self._schedule(self._wake.set)
        elif not self._delayed_wake_scheduled:
            self._delayed_wake_scheduled = True
            self._schedule(self._wake_later)

    def close(self) -> None:
        """Ends the stream once everything queued is sent, or after a few seconds."""
        self._closing = True
        self._schedule(self._close_on_loop)

    def _wake_later(self) -> None:
        loop = self._context.event_loop
        self._delayed_wake = loop.call_later(_ACKNOWLEDGEMENT_WAIT_S, self._wake.set)

    def _schedule(self, call: Callable[[], Any]) -> bool:
        try:
            self._context.event_loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The event loop is closed, and every stream with it.
            return False
        return True

    def _start_task(self) -> None:
        name = f"handoff to {self.decode}"
        self._task = self._context.event_loop.create_task(self._run(), name=name)

    def _close_on_loop(self) -> None:
        self._wake.set()
        if self._task is not None:
            # Before the handshake is complete, the queue is empty.
            timeout_s = _FLUSH_TIMEOUT_S if self._handshake_complete else 0.0
            self._context.event_loop.call_later(timeout_s, self._task.cancel)

    def _report_lost(self, error: HeadraceError) -> None:
        self.lease.revoke()
        if not self._closing:
            _log.warning("the handoff stream to %s ended: %s", self.decode, error.detail)
        if self.late_writes.in_flight and self._context.kill_timer is not None:
            _log.warning(
                "%d writes to %s are in flight without a stream: the kernel ends this process (SIGKILL) if they go on "
                "for %g s after their lease",
                self.late_writes.in_flight,
                self.decode,
                LateWriteGuard.allowed_s(self._quarantine_s),
            )
        self._post(StreamLost(self, error))
        if not self.ended.done():
            self.ended.set_result(None)

    async def _run(self) -> None:
        timeout_s = self._context.handshake_timeout_s
        error: HeadraceError = WorkerGone(
            f"{self.decode} ended the handoff stream", metadata={"worker": str(self.decode)}
        )
        try:
            async with asyncio.timeout(timeout_s):
                descriptor = await self._context.descriptors(self.decode, Deadline.after(timeout_s))
                await self._name_addresses(descriptor)
            require_compatible(self._context.layout, descriptor.layout)
            async with open_channel(self._endpoint, self._context.credentials) as channel:
                await self._exchange_messages(channel, descriptor)
        except HeadraceError as problem:
            error = problem
        except grpc.aio.AioRpcError as problem:
            error = error_from_rpc(problem)
        except TimeoutError:
            error = WorkerGone(
                f"{self.decode} did not answer within {timeout_s:g} s",
                metadata={"worker": str(self.decode)},
            )
        except asyncio.CancelledError:
            if not self._closing:
                raise
        except Exception:  # noqa: BLE001 - reported as a bug
            _log.exception("the handoff stream to %s met a bug", self.decode)
            error = InternalError(f"the handoff stream to {self.decode} met a bug")
        finally:
            self._report_lost(error)

    async def _name_addresses(self, descriptor: KvDescriptor) -> None:
        """Puts into Hello the addresses that decode must admit."""
        sessions = {rank.session for rank in descriptor.ranks}
        addresses = await asyncio.to_thread(self._context.transport.source_addresses, sessions)
        self._hello.transfer_addresses.extend(sorted(map(str, addresses)))

    async def _exchange_messages(self, channel: grpc.aio.Channel, descriptor: KvDescriptor) -> None:
        call = handoff_pb2_grpc.HandoffServiceStub(channel).Handoff()
        writer: asyncio.Task[None] | None = None
        try:
            welcome = await self._shake_hands(call)
            self._handshake_complete = True
            self._post(
                StreamReady(self, descriptor, DigestTerms(welcome.digest_share, welcome.word_sums))
            )
            writer = asyncio.create_task(self._send_queued(call))
            await self._receive_messages(call)
        finally:
            self.lease.revoke()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            call.cancel()

    async def _shake_hands(self, call: Any) -> handoff_pb2.Welcome:
        """Sends Hello and takes the lease from the Welcome."""
        async with asyncio.timeout(self._context.handshake_timeout_s):
            # Decode's lease starts after this moment, so this side's ends before decode's.
            hello_s = self._context.clock.lease_s()
            await call.write(handoff_pb2.HandoffRequest(hello=self._hello))
            response = await call.read()
        if not isinstance(response, handoff_pb2.HandoffResponse):
            raise WorkerGone(f"{self.decode} ended the handoff stream before its Welcome")
        if response.WhichOneof("message") != "welcome":
            raise ProtocolViolation(f"{self.decode} did not answer Hello with Welcome")
        self._grant_lease(hello_s, response.welcome)
        return response.welcome

    def _grant_lease(self, hello_s: float, welcome: handoff_pb2.Welcome) -> None:
        ttl_s = seconds_from_duration(welcome.lease_ttl)
        self._quarantine_s = seconds_from_duration(welcome.quarantine)
        if self._quarantine_s <= 0.0:
            raise ProtocolViolation(f"the Welcome of {self.decode} has no quarantine")
        self.lease = WriteLease(hello_s, self._context.clock.lease_s(), ttl_s)
        self.late_writes.lease_granted(self.lease.end_s, self._quarantine_s)

    async def _receive_messages(self, call: Any) -> None:
        try:
            # A timer for each message would cost more than most messages.
            async with asyncio.timeout(self._lease_s()) as limit:
                while isinstance(response := await call.read(), handoff_pb2.HandoffResponse):
                    self._receive(response)
                    if response.HasField("renewal"):
                        limit.reschedule(self._context.event_loop.time() + self._lease_s())
        except TimeoutError:
            raise TransferFailed(
                f"the write lease from {self.decode} ran out: no renewal came in time",
                metadata={"worker": str(self.decode)},
            ) from None

    def _lease_s(self) -> float:
        return self.lease.remaining_s(self._context.clock.lease_s())

    def _receive(self, response: handoff_pb2.HandoffResponse) -> None:
        match response.WhichOneof("message"):
            case "reservation":
                reservation = reservation_from_proto(response.reservation)
                self._post(ReservationReceived(self, reservation, response.ByteSize()))
            case "renewal":
                ttl_s = seconds_from_duration(response.renewal.lease_ttl)
                sent_s = seconds_from_duration(response.renewal.sent_after)
                if not self.lease.renew(self._context.clock.lease_s(), sent_s, ttl_s):
                    raise TransferFailed(f"the write lease from {self.decode} was renewed too late")
                self.late_writes.lease_granted(self.lease.end_s, self._quarantine_s)
            case "cancel":
                self._post(CancelReceived(self, response.cancel))
            case _:
                _log.warning("%s sent a message that is not in order on a stream", self.decode)

    async def _send_queued(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._wake_scheduled = self._delayed_wake_scheduled = False
            if self._delayed_wake is not None:
                # What waits for it is sent now.
                self._delayed_wake.cancel()
                self._delayed_wake = None
            for request in batches(self._drain()):
                await call.write(request)
            if self._overflow:
                call.cancel()
                raise QueueFull(f"{self.decode} reads messages too slowly")
            if self._closing and not self._outbox:
                await call.done_writing()
                return

    def _drain(self) -> Iterator[handoff_pb2.HandoffRequest]:
        """Everything queued, in order, with neighbouring layers together."""
        layers: list[handoff_pb2.LayerDone] = []
        while self._outbox:
            item = self._outbox.popleft()
            if isinstance(item, handoff_pb2.LayerDone):
                layers.append(item)
            if layers and (item is not layers[-1] or len(layers) == _LAYERS_PER_MESSAGE):
                yield _layers_done(layers)
                layers = []
            if isinstance(item, handoff_pb2.HandoffRequest):
                yield item
        if layers:
            yield _layers_done(layers)


def _layers_done(layers: list[handoff_pb2.LayerDone]) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(layers_done=handoff_pb2.LayersDone(layers=layers))


def batches(
    requests: Iterable[handoff_pb2.HandoffRequest],
) -> Iterator[handoff_pb2.HandoffRequest]:
    """The requests in order, in as few messages as possible. Hidden states, which are large, stay alone."""
    waiting: list[handoff_pb2.HandoffRequest] = []
    for request in requests:
        alone = request.HasField("hidden_state")
        if waiting and (alone or len(waiting) == _REQUESTS_PER_BATCH):
            yield _batch(waiting)
            waiting = []
        if alone:
            yield request
        else:
            waiting.append(request)
    if waiting:
        yield _batch(waiting)


def _batch(requests: list[handoff_pb2.HandoffRequest]) -> handoff_pb2.HandoffRequest:
    if len(requests) == 1:
        return requests[0]
    return handoff_pb2.HandoffRequest(batch=handoff_pb2.HandoffRequestBatch(requests=requests))
