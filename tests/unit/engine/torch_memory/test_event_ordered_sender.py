"""Layer ranges are sent once the device has written them. The test itself completes the device's work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from headrace_common.errors import QueueFull, TransferFailed
from headrace_engine.torch_memory.event_ordered_sender import EventOrderedSender, OrderingLimits
from headrace_kv.messages import LayerRange, TransferTarget

WAIT_S = 20.0
"""The sender has a thread of its own, so waits are real. They end with the awaited event."""


class Device:
    """A stream of work with `queued` items, of which the first `done` are complete."""

    def __init__(self) -> None:
        self.queued = 0
        self.done = 0
        self.broken = False
        self.polled = threading.Semaphore(0)

    def await_poll(self) -> None:
        """Waits until the thread has looked at a range and found it not written."""
        while self.polled.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self.polled.acquire(timeout=WAIT_S)

    def mark(self) -> DeviceMark:
        self.queued += 1
        return DeviceMark(self, self.queued)


@dataclass(frozen=True)
class DeviceMark:
    device: Device
    position: int

    def query(self) -> bool:
        if self.device.broken:
            raise RuntimeError("an illegal access")
        written = self.device.done >= self.position
        if not written:
            self.device.polled.release()
        return written


class Recorder:
    """A sender that records its calls. When it is full, it opens no transfer."""

    def __init__(self, full: bool = False) -> None:
        self.full = full
        self.pieces: list[LayerRange] = []
        self.events: list[str] = []
        self.stops: list[tuple[str, str, str]] = []
        self._changed = threading.Condition()

    def open(self, target: TransferTarget) -> None:
        if self.full:
            raise QueueFull("too many")
        self._record(f"open {target.transfer_id}")

    def push(self, piece: LayerRange) -> None:
        self.pieces.append(piece)
        self._record(f"push {piece.transfer_id} {piece.layer}")
        if piece.layer == 99:
            raise KeyError("a bug")

    def push_hidden_state(self, transfer_id: str, read: Callable[[], bytes]) -> None:
        self._record(f"hidden {transfer_id} {read().decode()}")

    def finish(self, transfer_id: str) -> None:
        self._record(f"finish {transfer_id}")

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        self.stops.append((transfer_id, reason, detail))
        self._record(f"stop {transfer_id}")

    def _record(self, event: str) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, count: int) -> list[str]:
        """Waits for `count` events and returns them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, WAIT_S), self.events
            return list(self.events)


class Rig:
    def __init__(self, limits: OrderingLimits | None) -> None:
        self.device, self.recorder = Device(), Recorder()
        self.sender = EventOrderedSender(self.recorder, self.device.mark, limits)

    def push(self, layer: int, transfer_id: str = "a") -> None:
        self.sender.push(LayerRange(transfer_id, layer, 0, 8, (1,), 17))


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Its parameter, if there is one, is the sender's limits."""
    rig = Rig(getattr(request, "param", None))
    yield rig
    rig.sender.close()


def test_ranges_are_sent_in_order_as_the_device_writes_them(rig: Rig) -> None:
    for layer in range(3):
        rig.push(layer)
    rig.sender.finish("a")
    for layer in range(3):
        rig.device.await_poll()
        assert rig.recorder.events == [f"push a {number}" for number in range(layer)]
        before_ns = time.monotonic_ns()
        rig.device.done = layer + 1
        rig.recorder.wait(layer + 1)
        # Ready is the time at which the device had written it, not that of the push.
        assert before_ns <= rig.recorder.pieces[layer].ready_ns <= time.monotonic_ns()
    assert rig.recorder.wait(4)[-1] == "finish a"


def test_a_hidden_state_is_read_once_the_device_has_copied_it(rig: Rig) -> None:
    copied: list[bytes] = []
    rig.push(0)
    rig.sender.push_hidden_state("a", lambda: copied[0])
    rig.sender.finish("a")
    rig.device.done = 1
    rig.recorder.wait(1)
    rig.device.await_poll()
    assert rig.recorder.events == ["push a 0"]
    copied.append(b"row")
    rig.device.done = 2
    assert rig.recorder.wait(3) == ["push a 0", "hidden a row", "finish a"]


def test_blocks_of_main_memory_wait_for_no_kernel_and_keep_their_place(rig: Rig) -> None:
    rig.sender.push(LayerRange("a", 0, 0, 8, (1,), 17, in_host_memory=True))
    assert rig.recorder.wait(1) == ["push a 0"]
    assert rig.device.queued == 0
    rig.push(1)
    rig.sender.push(LayerRange("a", 2, 0, 8, (1,), 17, in_host_memory=True))
    rig.device.await_poll()
    assert rig.recorder.events == ["push a 0"]
    rig.device.done = 1
    assert rig.recorder.wait(3) == ["push a 0", "push a 1", "push a 2"]


def test_a_stop_is_passed_on_before_waiting_ranges(rig: Rig) -> None:
    rig.push(0)
    rig.sender.stop("a", "CANCELLED", "enough")
    assert rig.recorder.events == ["stop a"]
    rig.device.done = 1
    # The sender ignores ranges of a stopped transfer.
    assert rig.recorder.wait(2) == ["stop a", "push a 0"]


@pytest.mark.parametrize("rig", [OrderingLimits(write_timeout_s=0.05)], indirect=True)
def test_a_range_that_is_not_written_in_time_fails_its_transfer(rig: Rig) -> None:
    rig.push(4)
    assert rig.recorder.wait(1) == ["stop a"]
    transfer_id, reason, detail = rig.recorder.stops[0]
    assert (transfer_id, reason) == ("a", TransferFailed.reason)
    assert "layer 4 in time" in detail
    rig.device.done = 2
    rig.push(5, "b")
    assert rig.recorder.wait(2)[-1] == "push b 5"


def test_a_failed_device_fails_the_transfers(rig: Rig) -> None:
    rig.push(0)
    rig.push(0, "b")
    rig.device.broken = True
    assert rig.recorder.wait(2) == ["stop a", "stop b"]
    assert "illegal access" in rig.recorder.stops[0][2]


@pytest.mark.parametrize("rig", [OrderingLimits(waiting=2)], indirect=True)
def test_too_many_waiting_ranges_fail_their_transfer(rig: Rig) -> None:
    # The thread holds one more.
    for layer in range(4):
        rig.push(layer)
    rig.recorder.wait(1)
    assert rig.recorder.stops[0][1] == QueueFull.reason


def test_a_bug_in_one_transfer_does_not_end_the_others(rig: Rig) -> None:
    rig.device.done = 10
    rig.push(99)
    rig.push(1, "b")
    assert rig.recorder.wait(2)[-1] == "push b 1"


def test_closing_drops_waiting_ranges(rig: Rig) -> None:
    rig.push(0)
    rig.push(1)
    rig.sender.close()
    rig.device.done = 10
    rig.push(2)
    rig.sender.finish("a")
    assert rig.recorder.events == []
