"""The sending side's stream to one peer's scatter agent."""

from __future__ import annotations

import queue
import threading
import time

import grpc

from headrace.kv.v1 import scatter_pb2, scatter_pb2_grpc
from headrace_common.errors import TransferFailed
from headrace_kv.block_map import Runs

_CLOSE_TIMEOUT_S = 1.0


class ScatterLane:
    """Slots in a peer's landing area. Used by one thread.

    Raises TransferFailed when the peer does not answer in time or lends no slots.
    """

    def __init__(self, session: str, timeout_s: float) -> None:
        target, _, token = session.partition("/")
        self._requests: queue.SimpleQueue[scatter_pb2.ScatterRequest | None] = queue.SimpleQueue()
        # Bounded by the requests: there is one response to each.
        self._responses: queue.SimpleQueue[scatter_pb2.ScatterResponse | str] = queue.SimpleQueue()
        self._sent = 0
        self._answered = 0
        self._channel = grpc.insecure_channel(target)
        stub = scatter_pb2_grpc.ScatterServiceStub(self._channel)
        self._call = stub.Scatter(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name="kv-scatter-lane", daemon=True)
        self._reader.start()
        attach = scatter_pb2.Attach(token=bytes.fromhex(token))
        self._requests.put(scatter_pb2.ScatterRequest(attach=attach))
        try:
            self.landing = self._next(time.monotonic() + timeout_s).landing
        except TransferFailed:
            self.close(clean=False)
            raise
        self._landed_s = time.monotonic()

    @property
    def broken(self) -> bool:
        """Whether the stream has ended."""
        return not self._call.is_active()

    def submit(self, slot: int, runs: Runs, deadline_s: float) -> int:
        """Says where the runs in a slot belong; returns the sequence to wait for. The order is the packed one."""
        self._sent += 1
        expiry_ns = self.landing.clock_ns + int((deadline_s - self._landed_s) * 1e9)
        self._requests.put(
            scatter_pb2.ScatterRequest(
                packed_runs=scatter_pb2.PackedRuns(
                    sequence=self._sent,
                    slot=slot,
                    destination_addresses=runs.destination_addresses.astype("<i8").tobytes(),
                    lengths=runs.lengths.astype("<i4").tobytes(),
                    expiry_clock_ns=max(0, expiry_ns),
                )
            )
        )
        return self._sent

    def wait(self, sequence: int, deadline_s: float) -> None:
        """Returns when message `sequence` and all before are scattered. Raises TransferFailed."""
        while self._answered < sequence:
            self._answered = self._next(deadline_s).scattered.sequence

    def close(self, *, clean: bool) -> None:
        """Ends the stream; `clean` when nothing is under way, so that the peer can lend the slots again at once."""
        self._requests.put(None)
        if clean:
            self._reader.join(_CLOSE_TIMEOUT_S)
        self._call.cancel()
        self._channel.close()
        self._reader.join(_CLOSE_TIMEOUT_S)

    def _next(self, deadline_s: float) -> scatter_pb2.ScatterResponse:
        try:
            response = self._responses.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise TransferFailed("the peer did not scatter packed KV bytes in time") from None
        if isinstance(response, scatter_pb2.ScatterResponse):
            return response
        raise TransferFailed(f"the peer does not scatter packed KV bytes: {response}")

    def _read(self) -> None:
        try:
            for response in self._call:
                self._responses.put(response)
        except grpc.RpcError:
            self._responses.put(self._call.details() or "the stream has broken")
        else:
            self._responses.put("the stream has ended")
