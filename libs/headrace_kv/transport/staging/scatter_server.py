"""The receiving side of staging: lends slots of a landing area and copies packed runs into place."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from headrace.kv.v1 import scatter_pb2, scatter_pb2_grpc
from headrace_common.errors import ConfigError
from headrace_common.limits import write_quiet_s
from headrace_kv.transport.guard import Networks, restrict_ports
from headrace_kv.transport.memory import HOST_MEMORY, Memory, MemoryRanges

# Streams beyond the loans, so that their senders get an answer.
_REFUSALS = 4


@dataclass(frozen=True, slots=True)
class LandingLimits:
    """The landing area: at most `senders` at a time, each with `slots` of `slot_bytes`.

    Bytes of a vanished sender may land for `quiet_s`. So long its slots are not lent again.
    """

    senders: int = 8
    slots: int = 3
    slot_bytes: int = 4 * 1024 * 1024
    quiet_s: float = write_quiet_s()

    @property
    def loan_bytes(self) -> int:
        """Bytes that one sender holds."""
        return self.slots * self.slot_bytes


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
        limits: LandingLimits,
        memory: Memory = HOST_MEMORY,
        admitted: Networks | None = None,
    ) -> None:
        self._ranges = ranges
        self._limits = limits
        self._memory = memory
        self._token = secrets.token_bytes(16)
        self.landing = memory.allocate(limits.senders * limits.loan_bytes)
        self._lock = threading.Lock()
        self._free_from_s = [0.0] * limits.senders
        self._lent: set[int] = set()
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
            with self._lock:
                self._lent.discard(loan)
                self._free_from_s[loan] = time.monotonic() + quarantine_s

    def _lend(self) -> int | None:
        with self._lock:
            now_s = time.monotonic()
            for loan, free_from_s in enumerate(self._free_from_s):
                if loan not in self._lent and free_from_s <= now_s:
                    self._lent.add(loan)
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
        area = self.landing[start : start + limits.slot_bytes]
        self._memory.scatter(area, addresses, lengths)
