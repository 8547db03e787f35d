"""Delays layer ranges until the device has written them. Does not import torch."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from headrace_common.errors import QueueFull, TransferFailed
from headrace_kv.messages import LayerRange, TransferTarget
from headrace_kv.transport.memory import PASSED, Mark

_log = logging.getLogger(__name__)

# The longest time between the device passing a mark and the range being sent.
_POLL_S = 50e-6


class Sender(Protocol):
    """The part of a RankSender that a step uses. Its methods do not block."""

    def open(self, target: TransferTarget) -> None: ...

    def push(self, layer_range: LayerRange) -> None: ...

    def push_hidden_state(self, transfer_id: str, read: Callable[[], bytes]) -> None: ...

    def finish(self, transfer_id: str) -> None: ...

    def stop(self, transfer_id: str, reason: str, detail: str) -> None: ...


@dataclass(frozen=True, slots=True)
class OrderingLimits:
    """`waiting`: the most ranges and ends in the queue. `write_timeout_s`: for the device to write a range."""

    waiting: int = 65_536
    write_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _MarkedRange:
    layer_range: LayerRange
    mark: Mark
    deadline_s: float

    @property
    def transfer_id(self) -> str:
        return self.layer_range.transfer_id

    def __str__(self) -> str:
        return f"layer {self.layer_range.layer}"


@dataclass(frozen=True, slots=True)
class _MarkedState:
    transfer_id: str
    read: Callable[[], bytes]
    mark: Mark
    deadline_s: float

    def __str__(self) -> str:
        return "the hidden state"


_Marked: TypeAlias = _MarkedRange | _MarkedState


class EventOrderedSender:
    """A Sender in front of another, for forward passes that only queue work on a device.

    `push` marks the device's queued work and returns. A thread passes the ranges on, in order, each once its mark is
    passed, with that time as `ready_ns`. So layers are sent while the device computes later ones, and never before
    they are written. A range that the device does not write, or not in time, fails its transfer.
    """

    def __init__(
        self, sender: Sender, mark: Callable[[], Mark], limits: OrderingLimits | None = None
    ) -> None:
        self._sender = sender
        self._mark = mark
        self._limits = limits or OrderingLimits()
        self._changed = threading.Condition()
        self._waiting: deque[_Marked | str] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-order", daemon=True)
        self._thread.start()

    def open(self, target: TransferTarget) -> None:
        """See RankSender.open."""
        self._sender.open(target)

    def push(self, layer_range: LayerRange) -> None:
        """The thread that has queued the writing kernels calls it. For blocks of main memory, any thread may."""
        deadline_s = time.monotonic() + self._limits.write_timeout_s
        mark = PASSED if layer_range.in_host_memory else self._mark()
        if not self._put(_MarkedRange(layer_range, mark, deadline_s)):
            self._reject(layer_range.transfer_id)

    def push_hidden_state(self, transfer_id: str, read: Callable[[], bytes]) -> None:
        """The thread that has queued the copy to host memory calls it. `read` is called once that copy is made."""
        deadline_s = time.monotonic() + self._limits.write_timeout_s
        if not self._put(_MarkedState(transfer_id, read, self._mark(), deadline_s)):
            self._reject(transfer_id)

    def finish(self, transfer_id: str) -> None:
        """Passed on after the ranges that were pushed before."""
        if not self._put(transfer_id):
            self._reject(transfer_id)

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        """Passed on at once: the sender ignores ranges of a stopped transfer."""
        self._sender.stop(transfer_id, reason, detail)

    def close(self) -> None:
        """Drops waiting ranges and ends the thread. Close the other sender afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._limits.write_timeout_s)

    def _put(self, item: _Marked | str) -> bool:
        with self._changed:
            if self._closed:
                return True
            if len(self._waiting) >= self._limits.waiting:
                return False
            self._waiting.append(item)
            self._changed.notify_all()
            return True

    def _reject(self, transfer_id: str) -> None:
        self._sender.stop(
            transfer_id, QueueFull.reason, "too many layer ranges wait for the device"
        )

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                if isinstance(item, str):
                    self._sender.finish(item)
                elif not self._wait_written(item):
                    continue
                elif isinstance(item, _MarkedState):
                    self._sender.push_hidden_state(item.transfer_id, item.read)
                else:
                    self._sender.push(replace(item.layer_range, ready_ns=time.monotonic_ns()))
            except Exception:  # noqa: BLE001 - one transfer's bug must not end the sending of all others
                _log.exception("a layer range was not passed on because of a bug")

    def _next(self) -> _Marked | str | None:
        """The next item, as soon as there is one; None at the end."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting.popleft()

    def _wait_written(self, item: _Marked) -> bool:
        """Waits for the device. When it does not write the item, fails the transfer and returns False."""
        failure = ""
        try:
            while not failure and not item.mark.query():
                if self._closed:
                    return False
                if time.monotonic() >= item.deadline_s:
                    failure = f"the device did not write {item} in time"
                time.sleep(_POLL_S)
        except RuntimeError as error:
            failure = f"the device failed before {item} was written: {error}"
        if failure:
            _log.error("%s: %s", item.transfer_id, failure)
            self._sender.stop(item.transfer_id, TransferFailed.reason, failure)
        return not failure
