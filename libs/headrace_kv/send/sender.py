"""Sends one prefill rank's KV, layer by layer, and is the only user of its transport."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass

from headrace_common.errors import QueueFull
from headrace_kv.handoff.messages import LayerRange, TransferTarget
from headrace_kv.send.context import SenderContext
from headrace_kv.send.loop import SendLoop
from headrace_kv.send.mailbox import SenderInbox
from headrace_kv.send.thread import SenderThread


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Bounds of one rank's sender: open transfers, and layer ranges that wait, over all transfers."""

    transfers: int = 1024
    waiting_ranges: int = 65_536


class RankSender:
    """Writes on a thread, and has one handoff stream per decode worker.

    The thread is its own unless `thread` is given. Every method may be called from any thread and does not block.
    """

    def __init__(
        self,
        context: SenderContext,
        *,
        limits: SenderLimits | None = None,
        thread: SenderThread | None = None,
    ) -> None:
        self.closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        limits = limits or SenderLimits()
        thread = thread or SenderThread(f"kv-sender-{context.ref.worker_id}-{context.rank}")
        self._inbox = SenderInbox(limits.transfers, limits.waiting_ranges, thread.changed)
        self._loop = SendLoop(context, self._inbox)
        thread.add(self._loop, self.closed)

    def open(self, target: TransferTarget) -> None:
        """Starts a transfer. The handshake runs while the prompt is computed.

        Raises DuplicateTransfer, QueueFull for too many transfers, or Draining after `close`.
        """
        self._inbox.admit(target.transfer_id, self._loop.open, target)

    def push(self, layer_range: LayerRange) -> None:
        """Queues a layer range that is in this rank's cache. The transfer fails when too many ranges wait."""
        if not self._inbox.admit_range(layer_range.transfer_id, self._loop.push, layer_range):
            self.stop(
                layer_range.transfer_id, QueueFull.reason, "too many layer ranges wait to be sent"
            )

    def push_logits(self, transfer_id: str, logits: bytes) -> None:
        """Queues the logits of the last token, before `finish`, for a target that asks for them."""
        self._inbox.post(self._loop.push_logits, transfer_id, logits)

    def finish(self, transfer_id: str) -> None:
        """The engine pushes no more. The transfer fails if layers are still missing."""
        self._inbox.post(self._loop.finish, transfer_id)

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        """Ends a transfer. `on_quiet` follows unless it has been called."""
        self._inbox.post(self._loop.stop, transfer_id, reason, detail)

    def active_transfers(self) -> frozenset[str]:
        """The transfers that were opened and are not quiet yet: their source blocks may still be read."""
        return self._inbox.active_transfers()

    def close(self) -> None:
        """Ends every transfer, then the streams and the sender's own thread. `closed` is done when all have ended.

        The event loop of the streams must run until then.
        """
        self._inbox.close(self._loop.stop_all)
