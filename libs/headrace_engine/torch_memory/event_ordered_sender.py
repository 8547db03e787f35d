"""Holds back what the device has not written yet. Knows no torch."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from headrace_common.errors import QueueFull, TransferFailed
from headrace_kv.handoff.messages import LayerRange, TransferTarget

_log = logging.getLogger(__name__)

# How late a piece may be sent on after the device has passed its mark.
_POLL_S = 50e-6


class Mark(Protocol):
    """A point in a device's work."""

    def query(self) -> bool:
        """Whether all work up to there is done. Raises RuntimeError when the device has failed."""


class Sender(Protocol):
    """What is fed, see RankSender. Nothing here blocks."""

    def open(self, target: TransferTarget) -> None: ...

    def push(self, piece: LayerRange) -> None: ...

    def push_logits(self, transfer_id: str, logits: bytes) -> None: ...

    def finish(self, transfer_id: str) -> None: ...

    def stop(self, transfer_id: str, reason: str, detail: str) -> None: ...


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Pieces and ends that may wait; seconds for the device to write a piece."""

    waiting: int = 65_536
    write_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _Piece:
    piece: LayerRange
    mark: Mark
    deadline_s: float


class EventOrderedSender:
    """A Sender before another, for engines whose forward pass only queues its work on a device.

    `push` marks the device's work so far and returns; the piece goes on, in order, once the mark is passed, and says
    that it was ready then. So layers are sent while the device computes later ones, and never before they are written.
    A piece that is not written in time, or whose device has failed, fails its transfer.
    """

    def __init__(
        self, sender: Sender, mark: Callable[[], Mark], limits: GateLimits | None = None
    ) -> None:
        self._sender = sender
        self._mark = mark
        self._limits = limits or GateLimits()
        self._changed = threading.Condition()
        self._waiting: deque[_Piece | str] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-gate", daemon=True)
        self._thread.start()

    def open(self, target: TransferTarget) -> None:
        """See RankSender.open."""
        self._sender.open(target)

    def push(self, piece: LayerRange) -> None:
        """Called by the thread that queued the writing of the piece."""
        deadline_s = time.monotonic() + self._limits.write_timeout_s
        waiting = _Piece(piece, self._mark(), deadline_s)
        if not self._put(waiting):
            self._refuse(piece.transfer_id)

    def push_logits(self, transfer_id: str, logits: bytes) -> None:
        """They are in host memory already."""
        self._sender.push_logits(transfer_id, logits)

    def finish(self, transfer_id: str) -> None:
        """The end comes after the pieces before it."""
        if not self._put(transfer_id):
            self._refuse(transfer_id)

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        """Overtakes what waits; the sender forgets pieces of a stopped transfer."""
        self._sender.stop(transfer_id, reason, detail)

    def close(self) -> None:
        """Drops what waits and ends the thread. Close the sender behind it afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._limits.write_timeout_s)

    def _put(self, item: _Piece | str) -> bool:
        with self._changed:
            if self._closed:
                return True
            if len(self._waiting) >= self._limits.waiting:
                return False
            self._waiting.append(item)
            self._changed.notify_all()
            return True

    def _refuse(self, transfer_id: str) -> None:
        self._sender.stop(transfer_id, QueueFull.reason, "too many pieces wait for the device")

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                if isinstance(item, str):
                    self._sender.finish(item)
                elif self._written(item):
                    self._sender.push(replace(item.piece, ready_unix_ns=time.time_ns()))
            except Exception:  # noqa: BLE001 - one transfer's bug must not end the sending of all others
                _log.exception("passing on what the device has written met a bug")

    def _next(self) -> _Piece | str | None:
        """The next item, as soon as there is one; None at the end."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting.popleft()

    def _written(self, item: _Piece) -> bool:
        """Waits for the piece; fails its transfer and returns False when it is not written."""
        failure = ""
        try:
            while not failure and not item.mark.query():
                if self._closed:
                    return False
                if time.monotonic() >= item.deadline_s:
                    failure = f"the device did not write layer {item.piece.layer} in time"
                time.sleep(_POLL_S)
        except RuntimeError as error:
            failure = f"the device failed before layer {item.piece.layer} was written: {error}"
        if failure:
            _log.error("%s: %s", item.piece.transfer_id, failure)
            self._sender.stop(item.piece.transfer_id, TransferFailed.reason, failure)
        return not failure
