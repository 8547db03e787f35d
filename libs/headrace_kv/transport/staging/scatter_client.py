"""The sending side's stream to one peer's scatter server."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import grpc

from headrace.kv.v1 import scatter_pb2, scatter_pb2_grpc
from headrace_common.errors import TransferFailed
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import host_of
from headrace_kv.transport.staging.buffer import BufferSlots
from headrace_kv.transport.staging.scatter_server import LandingLimits

_CLOSE_TIMEOUT_S = 1.0
_WATCH_S = 0.5

OnDone = Callable[[TransferFailed | None], None]
"""Called once with the outcome of a scatter. Must neither block nor raise."""


@dataclass(frozen=True, slots=True)
class _Pending:
    slot: int
    deadline_s: float
    on_done: OnDone


class ScatterClient:
    """A stream to a peer's scatter server, and the slots of the peer's landing area that it lends.

    One thread makes and closes it and acquires slots. Any thread may submit or abort. Raises TransferFailed when the
    peer does not answer in time or lends no slots.
    """

    def __init__(
        self, session: str, timeout_s: float, on_submit: Callable[[], None] = lambda: None
    ) -> None:
        target, _, token = session.partition("/")
        self._on_submit = on_submit
        # Bounded by the slots.
        self._requests: queue.SimpleQueue[scatter_pb2.ScatterRequest | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._sequence = 0
        self._fault = ""
        self.slots = BufferSlots(0)
        self._attached: Future[scatter_pb2.Landing] = Future()
        self._channel = grpc.insecure_channel(target)
        stub = scatter_pb2_grpc.ScatterServiceStub(self._channel)
        self._call = stub.Scatter(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name="kv-scatter-client", daemon=True)
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
    def first_deadline_s(self) -> float | None:
        """The earliest deadline of the pending scatters, by time.monotonic; None without any."""
        with self._lock:
            return min((pending.deadline_s for pending in self._pending.values()), default=None)

    def submit(self, slot: int, runs: Runs, deadline_s: float, on_done: OnDone) -> None:
        """Asks the peer to copy a slot's runs, packed in their order, into place. Frees the slot afterwards."""
        with self._lock:
            fault, idle = self._fault, not self._pending
            if not fault:
                self._sequence += 1
                self._pending[self._sequence] = _Pending(slot, deadline_s, on_done)
                self._requests.put(self._request(slot, runs, deadline_s))
        if fault:
            on_done(TransferFailed(fault))
        elif idle:
            self._on_submit()

    def abort(self, reason: str) -> None:
        """Ends the stream and fails the pending scatters."""
        with self._lock:
            self._fault = self._fault or reason
        self._call.cancel()

    def close(self, *, clean: bool) -> None:
        """Ends the stream. With `clean`, when nothing is pending, the peer can lend the slots again at once."""
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
                sequence=self._sequence,
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
                        self.slots.release(slot)
                    self._attached.set_result(response.landing)
                else:
                    self._finish(response.scattered.sequence)
        except grpc.RpcError:
            fault = self._call.details() or "the stream has broken"
        except Exception as error:  # noqa: BLE001 - the peer's answer is malformed
            fault = f"the peer's answer is wrong: {error}"
            self._call.cancel()
        self._fail(fault)

    def _finish(self, sequence: int) -> None:
        with self._lock:
            pending = self._pending.pop(sequence, None)
        if pending is not None:
            self.slots.release(pending.slot)
            pending.on_done(None)

    def _fail(self, fault: str) -> None:
        with self._lock:
            self._fault = self._fault or fault
            text = f"the peer does not scatter packed KV bytes: {self._fault}"
            pending, self._pending = list(self._pending.values()), {}
        self.slots.close(text)
        if not self._attached.done():
            self._attached.set_exception(TransferFailed(text))
        for one in pending:
            one.on_done(TransferFailed(text))


class ScatterWatchdog:
    """Aborts the streams of peers that exceed a deadline."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._clients: set[ScatterClient] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, client: ScatterClient) -> None:
        """Watches a stream that was made with `wake` as its `on_submit`."""
        with self._changed:
            self._clients.add(client)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kv-scatter-watch", daemon=True
                )
                self._thread.start()

    def discard(self, client: ScatterClient) -> None:
        """Stops watching a stream."""
        with self._changed:
            self._clients.discard(client)

    def wake(self) -> None:
        """Looks at the deadlines again: a scatter was submitted."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                deadlines = {one: one.first_deadline_s for one in self._clients if not one.broken}
                for client, end_s in deadlines.items():
                    if end_s is not None and end_s <= now_s:
                        client.abort("it did not come back in time")
                later = [
                    end_s for end_s in deadlines.values() if end_s is not None and end_s > now_s
                ]
                # A later write may have an earlier deadline.
                wait_s = min(*later, now_s + _WATCH_S) - now_s if later else None
                self._changed.wait(wait_s)


_log = logging.getLogger(__name__)

_ATTACH_TIMEOUT_S = 2.0
_CLIENT_LIMIT = 64


class ScatterClients:
    """Connects on demand. A peer that lends no slots is asked again after `retry_s`. One thread calls its methods."""

    def __init__(self, landing: LandingLimits, retry_s: float) -> None:
        self._landing = landing
        self._retry_s = retry_s
        self._watchdog = ScatterWatchdog()
        self._clients: OrderedDict[str, ScatterClient] = OrderedDict()
        self._refused_until_s: OrderedDict[str, float] = OrderedDict()

    def may_connect(self, session: str) -> bool:
        """Whether `connect` may return a client."""
        return session in self._clients or not self._refused(session)

    def connect(self, session: str, server: str, timeout_s: float) -> ScatterClient | None:
        """The stream to a peer's scatter server; None when the peer lends no slots."""
        client = self._clients.get(session)
        if client is not None and not client.broken:
            return client
        if client is not None:
            self._close(session, clean=False)
        if self._refused(session):
            return None
        try:
            client = ScatterClient(server, min(timeout_s, _ATTACH_TIMEOUT_S), self._watchdog.wake)
            self._require_equal_slots(client)
        except (TransferFailed, ValueError) as error:
            _log.info("runs to %s cannot be staged there: %s", host_of(server), error)
            self._refused_until_s[session] = time.monotonic() + self._retry_s
            if len(self._refused_until_s) > _CLIENT_LIMIT:
                self._refused_until_s.popitem(last=False)
            return None
        self._clients[session] = client
        self._watchdog.add(client)
        if len(self._clients) > _CLIENT_LIMIT:
            self._close_idle_cleanly(next(iter(self._clients)))
        return client

    def close(self) -> None:
        """Ends every stream."""
        for session in list(self._clients):
            self._close_idle_cleanly(session)
        self._watchdog.close()

    def _refused(self, session: str) -> bool:
        return self._refused_until_s.get(session, 0.0) > time.monotonic()

    def _require_equal_slots(self, client: ScatterClient) -> None:
        ours, theirs = self._landing, client.landing
        if (theirs.slot_bytes, theirs.slot_count) != (ours.slot_bytes, ours.slots):
            client.close(clean=True)
            raise TransferFailed("the peer's slots are not like ours")

    def _close_idle_cleanly(self, session: str) -> None:
        self._close(session, clean=self._clients[session].first_deadline_s is None)

    def _close(self, session: str, *, clean: bool) -> None:
        client = self._clients.pop(session)
        self._watchdog.discard(client)
        client.close(clean=clean)
