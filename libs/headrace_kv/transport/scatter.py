"""Landing slots: host memory of a receiver that it lends to senders, and copies from into place (scatter.proto)."""

from __future__ import annotations

import hmac
import logging
import math
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import grpc
import numpy as np

from headrace.kv.v1 import scatter_pb2, scatter_pb2_grpc
from headrace_common.errors import ConfigError, TransferFailed
from headrace_common.limits import write_quiet_s
from headrace_common.tasks import Recent
from headrace_kv.runs import Runs
from headrace_kv.transport.base import host_of
from headrace_kv.transport.guard import Networks, restrict_ports
from headrace_kv.transport.memory import HOST_MEMORY, Memory, MemoryRanges

_log = logging.getLogger(__name__)

# Streams beyond the loans, so that their senders get an answer.
_REFUSALS = 4
_ATTACH_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 1.0
_WATCH_S = 0.5
_CLIENT_LIMIT = 64


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """A receiver lends `slots` of `slot_bytes` to at most `senders` at a time.

    Bytes of a vanished sender may land for `quiet_s`. So long its slots are not lent again. A sender asks a peer that
    lends no slots again after `retry_s`. It gathers into `staging_slots` of its own. These are more than a peer lends,
    so that no peer occupies all of them.
    """

    senders: int = 8
    slots: int = 3
    slot_bytes: int = 4 * 1024 * 1024
    quiet_s: float = write_quiet_s()
    staging_slots: int = 6
    retry_s: float = 10.0

    @property
    def loan_bytes(self) -> int:
        """Bytes that one sender holds."""
        return self.slots * self.slot_bytes


class BufferSlots:
    """Slots 0 to `count` - 1. Any thread may call its methods."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._free = list(range(count))
        self._fault = ""

    def acquire(self, deadline_s: float) -> int:
        """Waits for a free slot. Raises TransferFailed at the deadline, by time.monotonic, or once closed."""
        with self._changed:
            while not self._free and not self._fault:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0.0:
                    raise TransferFailed("no staging or landing slot became free in time")
                self._changed.wait(remaining_s)
            if self._fault:
                raise TransferFailed(self._fault)
            # The slot that was used last is likeliest to be in a CPU cache.
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Makes a slot free."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def close(self, fault: str) -> None:
        """Fails every present and later `acquire`."""
        with self._changed:
            self._fault = fault
            self._changed.notify_all()


class _DaemonThreads(Executor):
    """One daemon thread per call, which does not delay the end of the process. The server bounds the calls."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the future carries it
                future.set_exception(error)

        threading.Thread(target=run, name="kv-scatter", daemon=True).start()
        return future


class ScatterServer(scatter_pb2_grpc.ScatterServiceServicer):
    """A gRPC server for at most `limits.senders` senders at a time.

    It copies into `ranges` only. Only hosts in `admitted` reach it; None means every host. Raises ConfigError when the
    server cannot listen on `host`.
    """

    def __init__(
        self,
        host: str,
        ranges: MemoryRanges,
        limits: StagingLimits,
        memory: Memory = HOST_MEMORY,
        admitted: Networks | None = None,
    ) -> None:
        self._ranges = ranges
        self._limits = limits
        self._memory = memory
        self._token = secrets.token_bytes(16)
        self.landing = memory.allocate(limits.senders * limits.loan_bytes)
        self._lock = threading.Lock()
        # By loan. Infinite while it is lent.
        self._free_from_s = [0.0] * limits.senders
        self._server = grpc.server(
            _DaemonThreads(),  # type: ignore[arg-type]  # the server only calls submit
            options=[("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=limits.senders + _REFUSALS,
        )
        scatter_pb2_grpc.add_ScatterServiceServicer_to_server(self, self._server)
        try:
            self._port = self._server.add_insecure_port(f"{host}:0")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host} for packed KV bytes: {error}") from error
        if admitted is not None:
            self.admit(admitted)
        self._server.start()
        self.session = f"{host}:{self._port}/{self._token.hex()}"

    def admit(self, networks: Networks | None) -> None:
        """From now on only hosts in `networks` reach the server. Ends the connections of others."""
        restrict_ports({self._port}, (), networks)

    def close(self) -> None:
        """Ends every stream and waits until no copy runs."""
        self._server.stop(None).wait(5.0)

    def Scatter(
        self, request_iterator: Iterator[scatter_pb2.ScatterRequest], context: grpc.ServicerContext
    ) -> Iterator[scatter_pb2.ScatterResponse]:
        """See scatter.proto."""
        attach = next(request_iterator, scatter_pb2.ScatterRequest())
        if not hmac.compare_digest(attach.attach.token, self._token):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong")
        loan = self._lend()
        if loan is None:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no slots are free")
        assert loan is not None
        quarantine_s = self._limits.quiet_s
        try:
            first_byte = int(self.landing.ctypes.data) + loan * self._limits.loan_bytes
            yield scatter_pb2.ScatterResponse(
                landing=scatter_pb2.Landing(
                    address=first_byte,
                    slot_bytes=self._limits.slot_bytes,
                    slot_count=self._limits.slots,
                    clock_ns=time.monotonic_ns(),
                )
            )
            for request in request_iterator:
                if request.HasField("detach"):
                    # Needed because a cancelled stream can look like one that has ended.
                    quarantine_s = 0.0
                    return
                self._scatter(request.packed_runs, loan, context)
                scattered = scatter_pb2.Scattered(sequence=request.packed_runs.sequence)
                yield scatter_pb2.ScatterResponse(scattered=scattered)
        finally:
            self._free_from_s[loan] = time.monotonic() + quarantine_s

    def _lend(self) -> int | None:
        with self._lock:
            now_s = time.monotonic()
            for loan, free_from_s in enumerate(self._free_from_s):
                if free_from_s <= now_s:
                    self._free_from_s[loan] = math.inf
                    return loan
        return None

    def _scatter(
        self, packed: scatter_pb2.PackedRuns, loan: int, context: grpc.ServicerContext
    ) -> None:
        addresses = np.frombuffer(packed.destination_addresses, "<i8").astype(np.int64, copy=False)
        lengths = np.frombuffer(packed.lengths, "<i4").astype(np.int64)
        limits = self._limits
        fits = (
            packed.slot < limits.slots
            and len(addresses) == len(lengths)
            and bool((lengths > 0).all())
            and int(lengths.sum()) <= limits.slot_bytes
        )
        if not fits or not self._ranges.covers(addresses, lengths):
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "packed runs lie outside their slot or the registered memory",
            )
        if time.monotonic_ns() >= packed.expiry_clock_ns:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "packed runs came late")
        start = loan * limits.loan_bytes + packed.slot * limits.slot_bytes
        self._memory.scatter(self.landing[start : start + limits.slot_bytes], addresses, lengths)


_LENT_SLOTS_MAX: Final = 64
OnDone = Callable[[TransferFailed | None], None]
"""Called once with the outcome of a scatter. Must neither block nor raise."""


class _Pending(NamedTuple):
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
                    for slot in range(min(response.landing.slot_count, _LENT_SLOTS_MAX)):
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


class ScatterClients:
    """Connects on demand. A peer that lends no slots is asked again after `retry_s`. One thread calls its methods.

    A thread of its own aborts the streams of peers that exceed a deadline.
    """

    def __init__(self, limits: StagingLimits) -> None:
        self._limits = limits
        # Guards what the thread reads: `_clients` and `_closed`.
        self._changed = threading.Condition()
        self._clients: OrderedDict[str, ScatterClient] = OrderedDict()
        self._closed = False
        self._watchdog: threading.Thread | None = None
        self._refused_until_s: Recent[str, float] = Recent(_CLIENT_LIMIT)

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
            client = ScatterClient(server, min(timeout_s, _ATTACH_TIMEOUT_S), self._wake)
            self._require_equal_slots(client)
        except (TransferFailed, ValueError) as error:
            _log.info("runs to %s cannot be staged there: %s", host_of(server), error)
            self._refused_until_s[session] = time.monotonic() + self._limits.retry_s
            return None
        with self._changed:
            self._clients[session] = client
        if self._watchdog is None:
            self._watchdog = threading.Thread(
                target=self._watch, name="kv-scatter-watch", daemon=True
            )
            self._watchdog.start()
        if len(self._clients) > _CLIENT_LIMIT:
            self._close_idle_cleanly(next(iter(self._clients)))
        return client

    def close(self) -> None:
        """Ends every stream."""
        for session in list(self._clients):
            self._close_idle_cleanly(session)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._watchdog is not None:
            self._watchdog.join(_CLOSE_TIMEOUT_S)

    def _refused(self, session: str) -> bool:
        return self._refused_until_s.get(session, 0.0) > time.monotonic()

    def _require_equal_slots(self, client: ScatterClient) -> None:
        ours, theirs = self._limits, client.landing
        if (theirs.slot_bytes, theirs.slot_count) != (ours.slot_bytes, ours.slots):
            client.close(clean=True)
            raise TransferFailed("the peer's slots are not like ours")

    def _close_idle_cleanly(self, session: str) -> None:
        self._close(session, clean=self._clients[session].first_deadline_s is None)

    def _close(self, session: str, *, clean: bool) -> None:
        with self._changed:
            client = self._clients.pop(session)
        client.close(clean=clean)

    def _wake(self) -> None:
        """A client without pending scatters has one now. Any thread may call it."""
        with self._changed:
            self._changed.notify_all()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                wait_s: float | None = None
                for client in self._clients.values():
                    end_s = None if client.broken else client.first_deadline_s
                    if end_s is None:
                        continue
                    if end_s <= now_s:
                        client.abort("it did not come back in time")
                        continue
                    # A later write may have an earlier deadline.
                    wait_s = min(wait_s or _WATCH_S, end_s - now_s)
                self._changed.wait(wait_s)
