"""Sends one prefill rank's KV, layer by layer, and is the only user of its transport."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace_common.errors import QueueFull
from headrace_kv.messages import LayerRange, TransferTarget
from headrace_kv.send.context import SenderContext
from headrace_kv.send.loop import SendLoop
from headrace_kv.send.mailbox import SenderInbox

_log = logging.getLogger(__name__)

_STREAMS_END_S = 4.0
_ENDING_POLL_S = 0.05


@dataclass(slots=True)
class _RunningLoop:
    """A loop of this thread. Once it has nothing more to send, it waits for its streams until `end_by_s`."""

    loop: SendLoop
    closed: concurrent.futures.Future[None]
    streams_ended: tuple[concurrent.futures.Future[None], ...] = ()
    end_by_s: float = 0.0

    @property
    def ending(self) -> bool:
        return self.end_by_s > 0.0

    def close_streams(self, now_s: float) -> None:
        """Closes the loop's streams, which have until `end_by_s` to end."""
        self.streams_ended = self.loop.close_streams()
        self.end_by_s = now_s + _STREAMS_END_S

    def has_ended(self, now_s: float) -> bool:
        """Whether the closed streams have ended, or took too long to."""
        return now_s >= self.end_by_s or all(ended.done() for ended in self.streams_ended)

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next turn is due, unless a command is posted before."""
        return float("inf") if self.ending else self.loop.wait_s(now_s)


class SenderThread:
    """Runs the send loops of one or several ranks, for as long as there are any.

    A write that blocks delays every loop of the thread, so a rank that sends much has a thread of its own. `changed`
    guards the inboxes of all the loops, and is notified of each command.
    """

    def __init__(self, name: str) -> None:
        self.changed = threading.Condition()
        self._name = name
        self._loops: list[_RunningLoop] = []
        self._running = False

    def add(self, loop: SendLoop, closed: concurrent.futures.Future[None]) -> None:
        """Runs a loop until it is over. `closed` is done when its streams have ended too, or took too long to."""
        with self.changed:
            self._loops.append(_RunningLoop(loop, closed))
            self.changed.notify()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while due := self._wait():
            now_s = time.monotonic()
            for running in due:
                if running.ending:
                    self._end(running, now_s)
                elif not _turn(running.loop):
                    running.close_streams(now_s)
                    self._end(running, now_s)

    def _wait(self) -> list[_RunningLoop]:
        """Waits for loops that have something to do or are ending; empty when all have ended."""
        with self.changed:
            while self._loops:
                now_s = time.monotonic()
                waits_s = [running.wait_s(now_s) for running in self._loops]
                due = [
                    running
                    for running, wait_s in zip(self._loops, waits_s, strict=True)
                    if wait_s <= 0.0
                ]
                ending = [running for running in self._loops if running.ending]
                if due:
                    return due + ending
                if ending:
                    waits_s.append(_ENDING_POLL_S)
                if not self.changed.wait(min(waits_s)) and ending:
                    return ending
            self._running = False
            return []

    def _end(self, running: _RunningLoop, now_s: float) -> None:
        if not running.has_ended(now_s):
            return
        with self.changed:
            self._loops.remove(running)
        running.closed.set_result(None)


def _turn(loop: SendLoop) -> bool:
    """Runs one turn; False when the loop is over or has failed."""
    try:
        loop.turn()
    except Exception:  # noqa: BLE001 - one loop's bug must not end the others
        _log.exception("a sender met a bug and sends no more")
        return False
    return not loop.over


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

    def push_hidden_state(self, transfer_id: str, read: Callable[[], bytes]) -> None:
        """Queues the hidden state of the last token, before `finish`, for a target that asks for it. Calls `read`."""
        self._inbox.post(self._loop.push_hidden_state, transfer_id, read())

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
