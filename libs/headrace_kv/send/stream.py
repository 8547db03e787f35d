"""The prefill side of one handoff stream: handshake, lease, and messages in both directions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

import grpc.aio

from headrace.kv.v1 import handoff_pb2, handoff_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    HeadraceError,
    InternalError,
    ProtocolViolation,
    QueueFull,
    TransferFailed,
    WorkerGone,
)
from headrace_common.rpc.channel import TlsFiles, open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_kv.handoff.clock import Clock
from headrace_kv.handoff.leases import WriteLease
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.compatibility import require_compatible
from headrace_kv.layout.layout import KvDescriptor, KvLayout, WorkerRef
from headrace_kv.layout.proto import layout_to_proto

_log = logging.getLogger(__name__)

DescriptorSource = Callable[[WorkerRef, Deadline], Awaitable[KvDescriptor]]
"""Finds the KV memory of a worker incarnation. Raises StaleIncarnation when it is gone."""

_LAYERS_PER_MESSAGE = 4096
_OUTBOX_LIMIT = 262_144
_FLUSH_TIMEOUT_S = 2.0


class LinkEvents(Protocol):
    """What a link tells its owner, on the link's event loop."""

    def link_ready(self, link: HandoffLink, descriptor: KvDescriptor) -> None:
        """The handshake is over."""

    def link_reserved(
        self, link: HandoffLink, reservation: Reservation, message_bytes: int
    ) -> None:
        """Decode answered an Open, with a message of so many bytes."""

    def link_cancelled(self, link: HandoffLink, cancel: handoff_pb2.Cancel) -> None:
        """Decode ends a transfer."""

    def link_ended(self, link: HandoffLink, error: HeadraceError) -> None:
        """Nothing is heard or said any more; the lease is gone. Comes once."""


class HandoffLink:
    """One stream from one prefill rank to one incarnation of a decode worker.

    `start`, `send`, `acknowledge` and `close` may be called from any thread; everything else runs on `loop`.
    """

    def __init__(  # noqa: PLR0913 - each part is another owner's
        self,
        *,
        ref: WorkerRef,
        rank: int,
        layout: KvLayout,
        decode: WorkerRef,
        endpoint: str,
        descriptors: DescriptorSource,
        loop: asyncio.AbstractEventLoop,
        events: LinkEvents,
        handshake_timeout_s: float,
        clock: Clock,
        tls: TlsFiles | None = None,
    ) -> None:
        self.decode = decode
        self.lease = WriteLease.none()
        self.digest_share = 0.0
        """The part of all (transfer, layer) pairs whose digests decode wants, once the stream is ready."""
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._layout = layout
        self._endpoint = endpoint
        self._tls = tls
        self._descriptors = descriptors
        self._loop = loop
        self._events = events
        self._handshake_timeout_s = handshake_timeout_s
        self._clock = clock
        self._hello = handoff_pb2.Hello(
            worker_id=ref.worker_id,
            incarnation=ref.incarnation,
            rank=rank,
            layout=layout_to_proto(layout),
            decode_worker_id=decode.worker_id,
            decode_incarnation=decode.incarnation,
        )
        self._outbox: deque[handoff_pb2.HandoffRequest | handoff_pb2.LayerDone] = deque()
        self._wake = asyncio.Event()
        self._wake_scheduled = False
        self._closing = False
        self._conversing = False
        self._overflow = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins the handshake. `link_ended` follows in any case."""
        if not self._schedule(self._start_task):
            self._finish(WorkerGone("the event loop of the handoff streams has ended"))

    def send(self, request: handoff_pb2.HandoffRequest) -> None:
        """Queues a message, behind what is queued already."""
        self._put(request)

    def acknowledge(self, layer: handoff_pb2.LayerDone) -> None:
        """Queues a landed layer; all that wait when the stream is next free go in one message."""
        self._put(layer)

    def close(self) -> None:
        """Ends the stream once everything queued is sent, within a few seconds."""
        self._closing = True
        self._schedule(self._close_on_loop)

    def _put(self, item: handoff_pb2.HandoffRequest | handoff_pb2.LayerDone) -> None:
        if len(self._outbox) >= _OUTBOX_LIMIT:
            self._overflow = True
        else:
            self._outbox.append(item)
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._schedule(self._wake.set)

    def _schedule(self, call: Callable[[], Any]) -> bool:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop is closed, and with it every stream: nobody is left to hear.
            return False
        return True

    def _start_task(self) -> None:
        self._task = self._loop.create_task(self._run(), name=f"handoff to {self.decode}")

    def _close_on_loop(self) -> None:
        self._wake.set()
        if self._task is not None:
            # Before the handshake nothing is queued that anybody waits for.
            timeout_s = _FLUSH_TIMEOUT_S if self._conversing else 0.0
            self._loop.call_later(timeout_s, self._task.cancel)

    def _finish(self, error: HeadraceError) -> None:
        self.lease.revoke()
        if not self._closing:
            _log.warning("the handoff stream to %s ended: %s", self.decode, error.detail)
        self._events.link_ended(self, error)
        if not self.ended.done():
            self.ended.set_result(None)

    async def _run(self) -> None:
        error: HeadraceError = WorkerGone(
            f"{self.decode} ended the handoff stream", metadata={"worker": str(self.decode)}
        )
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                deadline = Deadline.after(self._handshake_timeout_s)
                descriptor = await self._descriptors(self.decode, deadline)
            require_compatible(self._layout, descriptor.layout)
            async with open_channel(self._endpoint, self._tls) as channel:
                await self._converse(channel, descriptor)
        except HeadraceError as problem:
            error = problem
        except grpc.aio.AioRpcError as problem:
            error = error_from_rpc(problem)
        except TimeoutError:
            error = WorkerGone(
                f"{self.decode} did not answer within {self._handshake_timeout_s:g} s",
                metadata={"worker": str(self.decode)},
            )
        except asyncio.CancelledError:
            if not self._closing:
                raise
        except Exception:  # noqa: BLE001 - reported to the owner, as a bug
            _log.exception("the handoff stream to %s met a bug", self.decode)
            error = InternalError(f"the handoff stream to {self.decode} met a bug")
        finally:
            self._finish(error)

    async def _converse(self, channel: grpc.aio.Channel, descriptor: KvDescriptor) -> None:
        call = handoff_pb2_grpc.HandoffServiceStub(channel).Handoff()
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                # Decode's lease starts after this moment, so ours ends before decode's.
                hello_s = self._clock.monotonic_s()
                await call.write(handoff_pb2.HandoffRequest(hello=self._hello))
                welcome = await call.read()
            if not isinstance(welcome, handoff_pb2.HandoffResponse):
                await _raise_status(call)
                raise WorkerGone(f"{self.decode} ended the handoff stream before its Welcome")
            if welcome.WhichOneof("message") != "welcome":
                raise ProtocolViolation(f"{self.decode} did not answer Hello with Welcome")
            ttl_s = _seconds(welcome.welcome.lease_ttl)
            self.lease = WriteLease(hello_s, self._clock.monotonic_s(), ttl_s)
            self.digest_share = welcome.welcome.digest_share
            self._conversing = True
            self._events.link_ready(self, descriptor)
            writer = asyncio.create_task(self._write(call))
            await self._read(call)
            if not self._closing:
                await _raise_status(call)
        finally:
            self.lease.revoke()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            call.cancel()

    async def _read(self, call: Any) -> None:
        while True:
            try:
                async with asyncio.timeout(self.lease.remaining_s(self._clock.monotonic_s())):
                    response = await call.read()
            except TimeoutError:
                raise TransferFailed(
                    f"the write lease from {self.decode} ran out: it renews no more",
                    metadata={"worker": str(self.decode)},
                ) from None
            if not isinstance(response, handoff_pb2.HandoffResponse):
                return
            self._hear(response)

    def _hear(self, response: handoff_pb2.HandoffResponse) -> None:
        match response.WhichOneof("message"):
            case "reservation":
                said = response.reservation
                reservation = Reservation(
                    said.transfer_id,
                    tuple(said.block_ids),
                    said.start_token,
                    said.end_token,
                    tuple(tuple(group.block_ids) for group in said.further_block_ids),
                )
                self._events.link_reserved(self, reservation, response.ByteSize())
            case "renewal":
                ttl_s = _seconds(response.renewal.lease_ttl)
                sent_s = _seconds(response.renewal.sent_after)
                if not self.lease.renew(self._clock.monotonic_s(), sent_s, ttl_s):
                    raise TransferFailed(f"the write lease from {self.decode} was renewed too late")
            case "cancel":
                self._events.link_cancelled(self, response.cancel)
            case _:
                _log.warning("%s sent a message that is not in order on a stream", self.decode)

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._wake_scheduled = False
            for request in self._drain():
                await call.write(request)
            if self._overflow:
                call.cancel()
                raise QueueFull(f"{self.decode} takes messages too slowly")
            if self._closing and not self._outbox:
                await call.done_writing()
                return

    def _drain(self) -> Iterator[handoff_pb2.HandoffRequest]:
        """Everything queued, in order, with neighbouring layers in one message."""
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


def _seconds(duration: Any) -> float:
    return float(duration.ToNanoseconds()) / 1e9


async def _raise_status(call: Any) -> None:
    """Raises the error with which the server ended the stream, if it did."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code,
            await call.initial_metadata(),
            await call.trailing_metadata(),
            details=await call.details(),
        )
