"""The writes that a sender has under way. Plain state of the sender's thread."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from headrace_kv.handoff.clock import Clock
from headrace_kv.send.layer_write import LayerWrite
from headrace_kv.send.peer import SenderPeer
from headrace_kv.send.transfer import OutgoingTransfer
from headrace_kv.transport.base import KvTransport, WriteResult


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """One batch under way; the transport means to have ended it by `end_s` of the monotonic clock."""

    transfer: OutgoingTransfer
    peer: SenderPeer
    write: LayerWrite
    payload_bytes: int
    end_s: float


class WriteWindow:
    """Hands batches to the transport, and keeps no more under way to a session than the transport can use.

    A session has at most `pending_limit` writes under way, and no more bytes than one write may have, so that they
    are over well within a write lease.
    """

    def __init__(self, transport: KvTransport, clock: Clock) -> None:
        self._transport = transport
        self._clock = clock
        self._pending: set[PendingWrite] = set()
        self._windows: dict[str, tuple[int, int]] = {}

    def has_room(self, session: str, payload_bytes: int) -> bool:
        """Whether a write of so many bytes may start."""
        count, nbytes = self._windows.get(session, (0, 0))
        if not count:
            return True
        return (
            count < self._transport.pending_limit
            and nbytes + payload_bytes <= self._transport.byte_limit
        )

    def submit(
        self, transfer: OutgoingTransfer, peer: SenderPeer, write: LayerWrite, timeout_s: float
    ) -> tuple[PendingWrite, Future[WriteResult]]:
        """Starts the next batch of a copy; whatever goes wrong is in the future. `remove` follows when that is done."""
        nbytes = write.next_bytes
        batch = write.take()
        end_s = self._clock.monotonic_s() + timeout_s
        pending = PendingWrite(transfer, peer, write, nbytes, end_s)
        count, before = self._windows.get(write.session, (0, 0))
        self._windows[write.session] = (count + 1, before + nbytes)
        self._pending.add(pending)
        transfer.pending_count += 1
        try:
            future = self._transport.submit(write.session, batch, timeout_s)
        except Exception as error:  # noqa: BLE001 - an outcome like any other
            future = Future()
            future.set_exception(error)
        return pending, future

    def remove(self, pending: PendingWrite) -> None:
        """A write is over: its room is free."""
        self._pending.remove(pending)
        pending.transfer.pending_count -= 1
        session = pending.write.session
        count, nbytes = self._windows[session]
        if count == 1:
            del self._windows[session]
        else:
            self._windows[session] = (count - 1, nbytes - pending.payload_bytes)

    def overdue(self, now_s: float, grace_s: float) -> bool:
        """Whether some write is under way, and all should have ended more than `grace_s` ago."""
        ends_s = max((pending.end_s for pending in self._pending), default=now_s)
        return now_s > ends_s + grace_s
