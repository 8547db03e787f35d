"""The gRPC service of the Receiver: one handler for each prefill rank's stream."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc.aio

from headrace.kv.v1 import handoff_pb2, handoff_pb2_grpc
from headrace_common.access.roles import Role, current_caller, require_own_name
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import HeadraceError, PermissionDenied, ProtocolViolation, QueueFull
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.transfer import PrefillPeer
from headrace_kv.transport.guard import (
    Address,
    address_of_peer,
    plain_address,
    with_ipv4_loopback,
)

_HELLO_TIMEOUT_S = 10.0
_OUTBOX_LIMIT = 65_536

AdmitPeer = Callable[[frozenset[Address]], AbstractAsyncContextManager[None]]
"""Lets the transport of a peer with these addresses connect, within the context and a while longer."""


class _Outbox:
    """Messages to one prefill rank, and the error that ends its stream."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.ended: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()
        self._messages: deque[handoff_pb2.HandoffResponse] = deque()

    def send(self, message: handoff_pb2.HandoffResponse) -> None:
        if len(self._messages) >= _OUTBOX_LIMIT:
            self.end(QueueFull("the prefill rank reads its handoff stream too slowly"))
            return
        self._messages.append(message)
        self.wake.set()

    def end(self, error: HeadraceError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    def pop(self) -> handoff_pb2.HandoffResponse | None:
        return self._messages.popleft() if self._messages else None


class HandoffServicer(handoff_pb2_grpc.HandoffServiceServicer):
    """Serves handoff streams into a receiver.

    A rank gets its Welcome within the context of `admit`, when its transport may connect. `senders` are the roles of
    the workers that may send: on a decode worker prefill, on a prefill worker decode, and on one of both roles both.
    """

    def __init__(
        self,
        receiver: Receiver,
        admit: AdmitPeer | None = None,
        *,
        senders: Collection[Role] = (Role.PREFILL,),
    ) -> None:
        self._receiver = receiver
        self._senders = frozenset(senders)
        self._admit = admit or (lambda addresses: contextlib.nullcontext())

    async def Handoff(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[handoff_pb2.HandoffRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """See handoff.proto. Raises as Receiver.connect does, or the error with which the receiver ended the stream."""
        hello = await _read_hello(request_iterator)
        self._require_sender()
        require_own_name(hello.worker_id)
        addresses = peer_addresses(hello, context.peer())
        outbox = _Outbox()
        peer = self._receiver.connect(hello, outbox.send, outbox.end)
        tasks: set[asyncio.Task[None]] = set()
        try:
            async with self._admit(addresses):
                reader = asyncio.create_task(self._read(peer, request_iterator))
                tasks.add(reader)
                writer = asyncio.create_task(self._write(outbox, context))
                tasks.add(writer)
                waited: set[asyncio.Future[Any]] = {reader, writer, outbox.ended}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # The rank receives no more renewals: from here on its lease runs out.
            self._receiver.disconnect(peer)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        if outbox.ended.done():
            raise outbox.ended.result()
        for result in results:
            if isinstance(result, HeadraceError):
                raise result

    def _require_sender(self) -> None:
        """Raises PermissionDenied for a caller of another role. In the table of roles, both workers have one row."""
        if self._senders.isdisjoint(current_caller().roles):
            roles = " or ".join(sorted(self._senders))
            raise PermissionDenied(
                f"only the role {roles} may send KV to this worker", metadata={"role": roles}
            )

    async def _read(
        self, peer: PrefillPeer, requests: AsyncIterator[handoff_pb2.HandoffRequest]
    ) -> None:
        async for request in requests:
            for each in unpacked(request):
                self._receiver.handle(peer, each)

    async def _write(self, outbox: _Outbox, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        welcome = self._receiver.welcome()
        loop = asyncio.get_running_loop()
        interval_s = self._receiver.lease_ttl_s / 3
        welcome_s = loop.time()
        await context.write(handoff_pb2.HandoffResponse(welcome=welcome))
        renew_s = welcome_s + interval_s
        while True:
            outbox.wake.clear()
            while (message := outbox.pop()) is not None:
                await context.write(message)
            now_s = loop.time()
            if now_s >= renew_s:
                renewal = handoff_pb2.Renewal(
                    lease_ttl=welcome.lease_ttl,
                    sent_after=duration_from_seconds(now_s - welcome_s),
                )
                await context.write(handoff_pb2.HandoffResponse(renewal=renewal))
                renew_s = now_s + interval_s
            try:
                async with asyncio.timeout_at(renew_s):
                    await outbox.wake.wait()
            except TimeoutError:
                continue


def unpacked(request: handoff_pb2.HandoffRequest) -> Sequence[handoff_pb2.HandoffRequest]:
    """The messages of a batch, or the message itself."""
    return request.batch.requests if request.HasField("batch") else (request,)


def peer_addresses(hello: handoff_pb2.Hello, peer: str) -> frozenset[Address]:
    """The addresses from which a rank writes. `peer` is gRPC's name of the other end of its stream.

    Raises ProtocolViolation for a Hello with other texts.
    """
    try:
        found = {plain_address(ipaddress.ip_address(text)) for text in hello.transfer_addresses}
    except ValueError as error:
        raise ProtocolViolation(f"the transfer_addresses of the Hello are wrong: {error}") from None
    own = address_of_peer(peer)
    return with_ipv4_loopback(found if own is None else found | {own})


async def _read_hello(
    requests: AsyncIterator[handoff_pb2.HandoffRequest],
) -> handoff_pb2.Hello:
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await anext(aiter(requests), None)
    except TimeoutError:
        raise ProtocolViolation(f"no Hello came within {_HELLO_TIMEOUT_S:g} s") from None
    if first is None or first.WhichOneof("message") != "hello":
        raise ProtocolViolation("the first message on a handoff stream must be a Hello")
    return first.hello
