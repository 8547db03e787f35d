"""The sending side's stream to one peer's scatter agent."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import grpc

from headrace.kv.v1 import scatter_pb2, scatter_pb2_grpc
from headrace_common.errors import TransferFailed
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.staging.slots import Slots

_CLOSE_TIMEOUT_S = 1.0
_WATCH_S = 0.5

OnEnd = Callable[[TransferFailed | None], None]
"""Told once how a scattering has ended; must neither block nor raise."""


@dataclass(frozen=True, slots=True)
class _Asked:
    slot: int
    deadline_s: float
    on_end: OnEnd


class ScatterLane:
    """Slots in a peer's landing area.

    One thread makes, asks for slots and closes; any may submit or break off. Raises TransferFailed when the peer does
    not answer in time or lends no slots.
    """

    def __init__(
        self, session: str, timeout_s: float, on_submit: Callable[[], None] = lambda: None
    ) -> None:
        target, _, token = session.partition("/")
        self._on_submit = on_submit
        # Bounded by the slots.
        self._requests: queue.SimpleQueue[scatter_pb2.ScatterRequest | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}
        self._sent = 0
        self._fault = ""
        self.slots = Slots(0)
        self._attached: Future[scatter_pb2.Landing] = Future()
        self._channel = grpc.insecure_channel(target)
        stub = scatter_pb2_grpc.ScatterServiceStub(self._channel)
        self._call = stub.Scatter(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name="kv-scatter-lane", daemon=True)
        self._reader.start()
        attach = scatter_pb2.Attach(token=bytes.fromhex(token))
        self._requests.put(scatter_pb2.ScatterRequest(attach=attach))
        try:
            self.landing = self._attached.result(timeout_s)
        except FutureTimeoutError:
            self.close(clean=False)
            raise TransferFailed("the peer did not lend slots in time") from None
        except TransferFailed:
            self.close(clean=False)
            raise
        self._landed_s = time.monotonic()

    @property
    def broken(self) -> bool:
        """Whether the stream has ended or is about to."""
        return bool(self._fault)

    @property
    def end_s(self) -> float | None:
        """When the first of the scatterings under way should have ended, by time.monotonic."""
        with self._lock:
            return min((asked.deadline_s for asked in self._asked.values()), default=None)

    def submit(self, slot: int, runs: Runs, deadline_s: float, on_end: OnEnd) -> None:
        """Says where the runs in a slot belong, in the packed order; the slot is free when they are there."""
        with self._lock:
            fault, idle = self._fault, not self._asked
            if not fault:
                self._sent += 1
                self._asked[self._sent] = _Asked(slot, deadline_s, on_end)
                self._requests.put(self._request(slot, runs, deadline_s))
        if fault:
            on_end(TransferFailed(fault))
        elif idle:
            self._on_submit()

    def break_off(self, reason: str) -> None:
        """Ends the stream, and fails all that is under way."""
        with self._lock:
            self._fault = self._fault or reason
        self._call.cancel()

    def close(self, *, clean: bool) -> None:
        """Ends the stream; `clean` when nothing is under way, so that the peer can lend the slots again at once."""
        if clean:
            self._requests.put(scatter_pb2.ScatterRequest(detach=scatter_pb2.Detach()))
        self._requests.put(None)
        if clean:
            self._reader.join(_CLOSE_TIMEOUT_S)
        self._call.cancel()
        self._channel.close()
        self._reader.join(_CLOSE_TIMEOUT_S)

    def _request(self, slot: int, runs: Runs, deadline_s: float) -> scatter_pb2.ScatterRequest:
        expiry_ns = self.landing.clock_ns + int((deadline_s - self._landed_s) * 1e9)
        return scatter_pb2.ScatterRequest(
            packed_runs=scatter_pb2.PackedRuns(
                sequence=self._sent,
                slot=slot,
                destination_addresses=runs.destination_addresses.astype("<i8").tobytes(),
                lengths=runs.lengths.astype("<i4").tobytes(),
                expiry_clock_ns=max(0, expiry_ns),
            )
        )

    def _read(self) -> None:
        fault = "the stream has ended"
        try:
            for response in self._call:
                if response.WhichOneof("message") == "landing":
                    for slot in range(response.landing.slot_count):
                        self.slots.give(slot)
                    self._attached.set_result(response.landing)
                else:
                    self._end(response.scattered.sequence)
        except grpc.RpcError:
            fault = self._call.details() or "the stream has broken"
        except Exception as error:  # noqa: BLE001 - a peer that answers nonsense
            fault = f"the peer's answer is wrong: {error}"
            self._call.cancel()
        self._break(fault)

    def _end(self, sequence: int) -> None:
        with self._lock:
            asked = self._asked.pop(sequence, None)
        if asked is not None:
            self.slots.give(asked.slot)
            asked.on_end(None)

    def _break(self, fault: str) -> None:
        with self._lock:
            self._fault = self._fault or fault
            text = f"the peer does not scatter packed KV bytes: {self._fault}"
            asked, self._asked = list(self._asked.values()), {}
        self.slots.close(text)
        if not self._attached.done():
            self._attached.set_exception(TransferFailed(text))
        for one in asked:
            one.on_end(TransferFailed(text))


class LaneWatch:
    """Breaks off lanes whose peers take too long."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lanes: set[ScatterLane] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, lane: ScatterLane) -> None:
        """Watches a lane from now on; it has been made with `wake`."""
        with self._changed:
            self._lanes.add(lane)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kv-scatter-watch", daemon=True
                )
                self._thread.start()

    def discard(self, lane: ScatterLane) -> None:
        """Watches a lane no longer."""
        with self._changed:
            self._lanes.discard(lane)

    def wake(self) -> None:
        """Something new is under way."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the watch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                ends = {lane: lane.end_s for lane in self._lanes if not lane.broken}
                for lane, end_s in ends.items():
                    if end_s is not None and end_s <= now_s:
                        lane.break_off("it did not come back in time")
                later = [end_s for end_s in ends.values() if end_s is not None and end_s > now_s]
                # Later writes may have less time.
                wait_s = min(*later, now_s + _WATCH_S) - now_s if later else None
                self._changed.wait(wait_s)
