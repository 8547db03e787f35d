"""The handoff stream of the model: two queues of real messages. Each end detects the other's end late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.kv.v1 import handoff_pb2
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import HeadraceError, TransferFailed, WorkerGone
from headrace_kv.checksum import DigestTerms
from headrace_kv.layout import KvDescriptor, WorkerRef
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.transfer import PrefillPeer
from headrace_kv.send.stream import HandoffStream, SenderContext, StreamEvent, StreamReady
from tests.model.ground import TRANSPORT_S
from tests.model.virtual_time import VirtualHandle, VirtualTimers

Direction = Literal["to_decode", "to_prefill"]
END: Any = None
"""The last item of a wire: the other end has ended the stream."""


@dataclass(eq=False)
class Wire:
    """Messages in one direction, oldest first. None is delivered before `open_s`."""

    messages: deque[Any] = field(default_factory=deque)
    open_s: float = 0.0

    def put(self, message: Any) -> None:
        self.messages.append(message)


class SenderEnd(HandoffStream):
    """The real stream's rules without gRPC. Receives messages one by one, and ends itself when its lease runs out."""

    def __init__(
        self,
        context: SenderContext,
        decode: WorkerRef,
        endpoint: str,
        post: Callable[[StreamEvent], None],
        *,
        timers: VirtualTimers,
        connect: Callable[[SenderEnd], Wire],
    ) -> None:
        super().__init__(context, decode, endpoint, post)
        self.timers = timers
        self.descriptor: KvDescriptor | None = None
        self.over = False
        self._connect = connect
        self._wire = Wire()
        self._hello_s = 0.0
        self._watch: VirtualHandle | None = None

    def start(self) -> None:
        self._wire = self._connect(self)
        self._hello_s = self.timers.time()
        self._wire.put(handoff_pb2.HandoffRequest(hello=self._hello))
        self._watch = self.timers.call_later(
            self._context.handshake_timeout_s, self._check_handshake
        )

    def send(self, item: handoff_pb2.HandoffRequest | handoff_pb2.LayerDone) -> None:
        if self.over:
            return
        if isinstance(item, handoff_pb2.LayerDone):
            layers = handoff_pb2.LayersDone(layers=[item])
            item = handoff_pb2.HandoffRequest(layers_done=layers)
        self._wire.put(item)

    def close(self) -> None:
        self.end(WorkerGone("closed"))

    def end(self, error: HeadraceError) -> None:
        """Ends the stream from this side."""
        if self.over:
            return
        self.over = True
        if self._watch is not None:
            self._watch.cancel()
        self._wire.put(END)
        self._report_lost(error)

    def crash(self) -> None:
        """This side's process has crashed."""
        self.over = True
        if self._watch is not None:
            self._watch.cancel()

    def receive(self, message: Any) -> None:
        """Handles one message from decode."""
        if self.over:
            return
        if message is END:
            self.end(WorkerGone("decode ended the stream"))
        elif message.WhichOneof("message") == "welcome":
            self._grant_lease(self._hello_s, message.welcome)
            assert self.descriptor is not None
            self._post(
                StreamReady(self, self.descriptor, DigestTerms(message.welcome.digest_share))
            )
            self._watch_lease()
        else:
            try:
                self._receive(message)
            except TransferFailed as error:
                self.end(error)
            else:
                self._watch_lease()

    def _watch_lease(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        left_s = self.lease.remaining_s(self.timers.time())
        self._watch = self.timers.call_later(left_s, self._check_lease)

    def _check_handshake(self) -> None:
        self.end(WorkerGone("no Welcome in time"))

    def _check_lease(self) -> None:
        if self.lease.alive(self.timers.time()):
            self._watch_lease()
        else:
            self.end(TransferFailed("the lease ran out"))


class ModelStream:
    """One stream. Decode's end does what HandoffServicer does with a Receiver."""

    def __init__(
        self, sender_end: SenderEnd, receiver: Receiver | None, timers: VirtualTimers
    ) -> None:
        self.sender_end = sender_end
        self.to_decode = Wire()
        self.to_prefill = Wire()
        self._receiver = receiver
        self._timers = timers
        self._peer: PrefillPeer | None = None
        self._welcome_s = 0.0
        self._over = False
        self._renewal: VirtualHandle | None = None

    def wire(self, direction: Direction) -> Wire:
        return self.to_decode if direction == "to_decode" else self.to_prefill

    def ready(self, direction: Direction) -> bool:
        """Whether a message can be delivered now."""
        wire = self.wire(direction)
        return bool(wire.messages) and self._timers.time() >= wire.open_s

    def deliver(self, direction: Direction) -> None:
        message = self.wire(direction).messages.popleft()
        if direction == "to_prefill":
            self.sender_end.receive(message)
        elif not self._over:
            self._receive(message)

    def end_at_decode(self, error: HeadraceError) -> None:
        """Decode's end stops receiving. Messages that it has sent are still delivered."""
        self._timers.call_later(0.0, self._disconnect)

    def _disconnect(self) -> None:
        if self._over:
            return
        self._over = True
        if self._renewal is not None:
            self._renewal.cancel()
        if self._receiver is not None and self._peer is not None:
            self._receiver.disconnect(self._peer)
        self.to_prefill.put(END)

    def vanish(self) -> None:
        """Decode's process has crashed."""
        if self._over:
            return
        self._over, self._receiver = True, None
        if self._renewal is not None:
            self._renewal.cancel()
        self.to_prefill.put(END)

    def _receive(self, message: Any) -> None:
        if message is END or self._receiver is None:
            self.end_at_decode(WorkerGone("the prefill rank ended the stream"))
        elif message.WhichOneof("message") == "hello" and self._peer is None:
            self._accept(self._receiver, message.hello)
        elif self._peer is None:
            self.end_at_decode(WorkerGone("the first message was no Hello"))
        else:
            self._receiver.handle(self._peer, message)

    def _accept(self, receiver: Receiver, hello: handoff_pb2.Hello) -> None:
        try:
            self._peer = receiver.connect(hello, self.to_prefill.put, self.end_at_decode)
        except HeadraceError as error:
            self.end_at_decode(error)
            return
        self._welcome_s = self._timers.time()
        welcome = receiver.welcome()
        # A model may shorten the quarantine that decode keeps. Senders count on the one of the transport.
        welcome.quarantine.CopyFrom(duration_from_seconds(TRANSPORT_S))
        self.to_prefill.put(handoff_pb2.HandoffResponse(welcome=welcome))
        self._renew_later()

    def _renew_later(self) -> None:
        assert self._receiver is not None
        interval_s = self._receiver.lease_ttl_s / 3
        self._renewal = self._timers.call_later(interval_s, self._renew)

    def _renew(self) -> None:
        assert self._receiver is not None
        renewal = handoff_pb2.Renewal(
            lease_ttl=duration_from_seconds(self._receiver.lease_ttl_s),
            sent_after=duration_from_seconds(self._timers.time() - self._welcome_s),
        )
        self.to_prefill.put(handoff_pb2.HandoffResponse(renewal=renewal))
        self._renew_later()
