"""Sends one prefill rank's KV, layer by layer, and is the only user of its transport."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from dataclasses import dataclass

from headrace_common.errors import QueueFull
from headrace_common.rpc.channel import TlsFiles
from headrace_kv.handoff.messages import LayerRange, SendReport, TransferTarget
from headrace_kv.layout.layout import KvLayout, RankMemory, WorkerRef
from headrace_kv.send.context import SenderContext
from headrace_kv.send.loop import SendLoop
from headrace_kv.send.mailbox import SenderInbox
from headrace_kv.send.stream import DescriptorSource
from headrace_kv.send.thread import SenderThread
from headrace_kv.transport.base import KvTransport

__all__ = ["DescriptorSource", "RankSender", "SenderLimits"]


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Bounds of one rank's sender.

    `transfers` open at a time; `pieces` waiting over all of them; seconds for a handshake with a decode worker.
    """

    transfers: int = 1024
    pieces: int = 65_536
    handshake_timeout_s: float = 10.0


class RankSender:
    """Writes on a thread, and has one handoff stream per decode worker on `loop`.

    The thread is its own unless `thread` is given; the streams are plaintext unless `tls`
    names files. Every method may be called from any thread and does not block.
    `on_quiet` is called once for each opened transfer, on the thread, when nothing of it is or will be written.
    """

    def __init__(  # noqa: PLR0913 - each part is another owner's
        self,
        *,
        ref: WorkerRef,
        rank: int,
        layout: KvLayout,
        memory: RankMemory,
        transport: KvTransport,
        descriptors: DescriptorSource,
        loop: asyncio.AbstractEventLoop,
        on_quiet: Callable[[SendReport], None],
        limits: SenderLimits | None = None,
        thread: SenderThread | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        limits = limits or SenderLimits()
        parts = SenderContext(
            ref=ref,
            rank=rank,
            layout=layout,
            memory=memory,
            transport=transport,
            descriptors=descriptors,
            loop=loop,
            on_quiet=on_quiet,
            handshake_timeout_s=limits.handshake_timeout_s,
            tls=tls,
        )
        thread = thread or SenderThread(f"kv-sender-{ref.worker_id}-{rank}")
        self._inbox = SenderInbox(limits.transfers, limits.pieces, thread.changed)
        self._loop = SendLoop(parts, self._inbox)
        thread.add(self._loop, self.closed)

    def open(self, target: TransferTarget) -> None:
        """Starts a transfer; the handshake goes on beside the computation.

        Raises DuplicateTransfer, QueueFull for too many transfers, or Draining after `close`.
        """
        self._inbox.admit(target.transfer_id, self._loop.open, target)

    def push(self, piece: LayerRange) -> None:
        """Hands over a piece that is in this rank's cache. Too many waiting pieces fail the transfer."""
        if not self._inbox.admit_piece(piece.transfer_id, self._loop.push, piece):
            self.stop(piece.transfer_id, QueueFull.reason, "too many pieces wait to be sent")

    def push_logits(self, transfer_id: str, logits: bytes) -> None:
        """Hands over the logits of the last token, of a target that asks for them, before `finish`."""
        self._inbox.post(self._loop.push_logits, transfer_id, logits)

    def finish(self, transfer_id: str) -> None:
        """The engine will push no more: the transfer fails if something is still missing then."""
        self._inbox.post(self._loop.finish, transfer_id)

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        """Ends a transfer; `on_quiet` follows unless it has been called."""
        self._inbox.post(self._loop.stop, transfer_id, reason, detail)

    def is_active(self, transfer_id: str) -> bool:
        """Whether the transfer was opened and is not quiet yet: its source blocks are still read."""
        return self._inbox.is_active(transfer_id)

    def active_transfers(self) -> frozenset[str]:
        """The transfers that are not quiet yet."""
        return self._inbox.active()

    def close(self) -> None:
        """Ends every transfer, then the streams and its own thread; `closed` is done when all have ended.

        The streams need `loop` to run until then.
        """
        self._inbox.close(self._loop.stop_all)
