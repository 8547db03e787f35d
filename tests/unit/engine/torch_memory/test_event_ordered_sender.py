"""Pieces go on when the device has written them: a device whose work the test completes by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from headrace_common.errors import QueueFull, TransferFailed
from headrace_engine.torch_memory.event_ordered_sender import EventOrderedSender, GateLimits
from headrace_kv.handoff.messages import LayerRange, TransferTarget

WAIT_S = 5.0


class Device:
    """A stream of work: `queued` counts what was queued, `done` what is complete, in order."""

    def __init__(self) -> None:
        self.queued = 0
        self.done = 0
        self.broken = False

    def mark(self) -> DeviceMark:
        self.queued += 1
        return DeviceMark(self, self.queued)


class DeviceMark:
    def __init__(self, device: Device, position: int) -> None:
        self._device = device
        self._position = position

    def query(self) -> bool:
        if self._device.broken:
            raise RuntimeError("an illegal access was met")
        return self._device.done >= self._position


class Recorder:
    """A sender that notes what reaches it."""

    def __init__(self) -> None:
        self.pieces: list[LayerRange] = []
        self.events: list[str] = []
        self.stops: list[tuple[str, str, str]] = []
        self._changed = threading.Condition()

    def open(self, target: TransferTarget) -> None:
        self._note(f"open {target.transfer_id}")

    def push(self, piece: LayerRange) -> None:
        self.pieces.append(piece)
        self._note(f"push {piece.transfer_id} {piece.layer}")
        if piece.layer == 99:
            raise KeyError("a bug")

    def push_logits(self, transfer_id: str, logits: bytes) -> None:
        self._note(f"logits {transfer_id}")

    def finish(self, transfer_id: str) -> None:
        self._note(f"finish {transfer_id}")

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        self.stops.append((transfer_id, reason, detail))
        self._note(f"stop {transfer_id}")

    def _note(self, event: str) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, count: int) -> list[str]:
        """The events, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, WAIT_S), self.events
            return list(self.events)


class Gate:
    def __init__(self, limits: GateLimits | None = None) -> None:
        self.device, self.recorder = Device(), Recorder()
        self.sender = EventOrderedSender(self.recorder, self.device.mark, limits)

    def push(self, layer: int, transfer_id: str = "a") -> None:
        self.sender.push(LayerRange(transfer_id, layer, 0, 8, (1,), 17))


@pytest.fixture
def make_gate() -> Iterator[Callable[..., Gate]]:
    gates: list[Gate] = []

    def make(limits: GateLimits | None = None) -> Gate:
        gates.append(Gate(limits))
        return gates[-1]

    yield make
    for gate in gates:
        gate.sender.close()


def test_pieces_go_on_in_order_as_the_device_writes_them(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate()
    for layer in range(3):
        gate.push(layer)
    gate.sender.finish("a")
    for layer in range(3):
        time.sleep(0.02)
        assert gate.recorder.events == [f"push a {number}" for number in range(layer)]
        before_ns = time.time_ns()
        gate.device.done = layer + 1
        gate.recorder.wait(layer + 1)
        # Ready is when the device had written it, not when it was told to.
        assert before_ns <= gate.recorder.pieces[layer].ready_unix_ns <= time.time_ns()
    assert gate.recorder.wait(4)[-1] == "finish a"


def test_an_opening_is_passed_on_at_once_and_a_stop_overtakes(
    make_gate: Callable[..., Gate],
) -> None:
    gate = make_gate()
    gate.push(0)
    gate.sender.stop("a", "CANCELLED", "enough")
    assert gate.recorder.events == ["stop a"]
    gate.device.done = 1
    # The sender knows that the transfer is over.
    assert gate.recorder.wait(2) == ["stop a", "push a 0"]


def test_what_is_not_written_in_time_fails_its_transfer(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate(GateLimits(write_timeout_s=0.05))
    gate.push(4)
    assert gate.recorder.wait(1) == ["stop a"]
    transfer_id, reason, detail = gate.recorder.stops[0]
    assert (transfer_id, reason) == ("a", TransferFailed.reason)
    assert "layer 4 in time" in detail
    gate.device.done = 2
    gate.push(5, "b")
    assert gate.recorder.wait(2)[-1] == "push b 5"


def test_a_failed_device_fails_the_transfers(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate()
    gate.push(0)
    gate.push(0, "b")
    gate.device.broken = True
    assert gate.recorder.wait(2) == ["stop a", "stop b"]
    assert "illegal access" in gate.recorder.stops[0][2]


def test_too_many_pieces_fail_their_transfer(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate(GateLimits(waiting=2))
    # One more is with the thread.
    for layer in range(4):
        gate.push(layer)
        time.sleep(0.02)
    assert gate.recorder.stops
    assert gate.recorder.stops[0][1] == QueueFull.reason


def test_one_bug_does_not_end_the_others(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate()
    gate.device.done = 10
    gate.push(99)
    gate.push(1, "b")
    assert gate.recorder.wait(2)[-1] == "push b 1"


def test_closing_drops_what_waits(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate()
    gate.push(0)
    gate.push(1)
    start_s = time.monotonic()
    gate.sender.close()
    assert time.monotonic() - start_s < 2.0
    gate.device.done = 10
    gate.push(2)
    gate.sender.finish("a")
    time.sleep(0.05)
    assert gate.recorder.events == []
