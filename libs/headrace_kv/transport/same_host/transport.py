"""Writes to the memory of another process of this host by process_vm_writev.

A session proves three things before the first write: the same boot of the same kernel, the same pid namespace, and
permission. Permission is proven by reading a random token at an address in the session. The page with the token also
lists the receiver's registered ranges, because the kernel would write anywhere.

Before each system call the sender checks the token and that the process is alive. After the last one it checks again
that the process is alive, so that a write to a dead process never counts as landed.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.base import KvTransport, WriteResult
from headrace_kv.transport.ranges import MemoryRanges
from headrace_kv.transport.same_host.process_memory import (
    ENTRIES_PER_CALL,
    ProcessMemory,
    start_time_ticks,
    tracing_scope,
)
from headrace_kv.transport.same_host.tracers import Permit, PermitServer
from headrace_kv.transport.sessions import session_of

_log = logging.getLogger(__name__)

# The page: token (two words), count of ranges, one spare word, then base and bytes of each range.
_TOKEN_BYTES = 16
_HEADER_WORDS = 4
_RANGE_LIMIT = 254
_PAGE_WORDS = _HEADER_WORDS + 2 * _RANGE_LIMIT
_PEER_LIMIT = 1024
_BYTES_PER_CALL = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Address:
    """The parts of a session."""

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int
    page_address: int
    token: bytes
    permit_server: str = ""

    def text(self) -> str:
        parts = (
            self.boot_id,
            self.pid_namespace,
            str(self.pid),
            str(self.start_ticks),
            f"{self.page_address:x}",
            self.token.hex(),
            self.permit_server,
        )
        return ".".join(parts if self.permit_server else parts[:-1])


class _Peer:
    """A process that has passed the proof, and its registered ranges as last read."""

    def __init__(self, address: _Address) -> None:
        self._address = address
        self._permit: Permit | None = None
        self.memory = ProcessMemory(address.pid, address.start_ticks)
        self.ranges = MemoryRanges()
        try:
            if address.permit_server:
                self._permit = Permit(address.permit_server, address.token)
            self.refresh()
        except TransferFailed:
            self.close()
            raise

    def close(self) -> None:
        """Releases the process. Call it once."""
        self.memory.close()
        if self._permit is not None:
            self._permit.close()

    def check(self) -> None:
        """Raises TransferFailed unless the process is alive and its transport is open."""
        self.memory.require_alive()
        if self.memory.read(self._address.page_address, _TOKEN_BYTES) != self._address.token:
            raise TransferFailed(f"the transport of process {self._address.pid} is closed")

    def refresh(self) -> None:
        """Reads the ranges again. Raises as `check` does."""
        self.check()
        page = np.frombuffer(
            self.memory.read(self._address.page_address, _PAGE_WORDS * 8), np.uint64
        )
        count = min(int(page[2]), _RANGE_LIMIT)
        pairs = page[_HEADER_WORDS : _HEADER_WORDS + 2 * count].reshape(-1, 2).tolist()
        self.ranges = MemoryRanges(tuple((base, base + nbytes) for base, nbytes in pairs))


class SameHostTransport(KvTransport):
    """Connects processes that share a host, a pid namespace and a user.

    Where Yama's ptrace_scope is 1, `permit_tracers` lets connected senders read and write this process (tracers.py).
    Without it they cannot prove permission there. Raises ConfigError where the kernel cannot identify processes.
    """

    name = "same_host"
    # The system call returns after the kernel has copied: nothing lands later.
    quiet_after_failure_s = 0.0
    entry_limit = 8192

    def __init__(self, *, permit_tracers: bool = False) -> None:
        self._lock = threading.Lock()
        self._own = MemoryRanges()
        self._page = np.zeros(_PAGE_WORDS, np.uint64)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._page[:2] = np.frombuffer(token, np.uint64)
        self._host = _host_identity()
        scope = tracing_scope()
        self._permits = PermitServer(token) if scope == 1 and permit_tracers else None
        self._address = _Address(
            *self._host,
            os.getpid(),
            start_time_ticks(os.getpid()),
            self._page.ctypes.data,
            token,
            self._permits.name if self._permits is not None else "",
        )
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._closed = False
        if scope and self._permits is None:
            _log.info(
                "Yama's ptrace_scope is %d: peers of this host can hardly write to process %d directly",
                scope,
                os.getpid(),
            )

    @property
    def session(self) -> str:
        return self._address.text()

    def register(self, base_address: int, nbytes: int) -> None:
        if nbytes <= 0:
            raise ConfigError(f"cannot register {nbytes} bytes of KV memory")
        with self._lock:
            count = int(self._page[2])
            if count >= _RANGE_LIMIT:
                raise ConfigError(
                    f"{_RANGE_LIMIT} memory ranges are registered already: use one arena per rank"
                )
            first = _HEADER_WORDS + 2 * count
            self._page[first : first + 2] = (base_address, nbytes)
            self._page[2] = count + 1
            self._own.add(base_address, nbytes)

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        session = session_of(self.name, session) or session
        with self._lock:
            if self._closed:
                raise TransferFailed("the transport is closed")
            if not self._own.covers(runs.source_addresses, runs.lengths):
                raise TransferFailed("a source address is not registered")
            peer = self._peer(session)
            try:
                self._write(peer, runs, time.monotonic() + timeout_s)
            except TransferFailed:
                # The next write repeats the proof.
                self._peers.pop(session).close()
                raise
        return WriteResult(self.name, "direct", len(runs))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._page[:] = 0
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
            permits, self._permits = self._permits, None
        if permits is not None:
            permits.close()

    def _write(self, peer: _Peer, runs: Runs, deadline_s: float) -> None:
        if not peer.ranges.covers(runs.destination_addresses, runs.lengths):
            peer.refresh()
            if not peer.ranges.covers(runs.destination_addresses, runs.lengths):
                raise TransferFailed("a destination address is not registered")
        written_bytes = 0
        for batch in runs.batches(ENTRIES_PER_CALL, _BYTES_PER_CALL):
            if time.monotonic() >= deadline_s:
                raise TransferFailed("copying to another process took longer than its time")
            peer.check()
            try:
                peer.memory.write(batch)
            except TransferFailed as error:
                if written_bytes:
                    error.metadata.pop("written_bytes", None)
                raise
            written_bytes += batch.payload_bytes
        peer.memory.require_alive()

    def _peer(self, session: str) -> _Peer:
        peer = self._peers.get(session)
        if peer is None:
            peer = _Peer(self._parse(session))
            self._peers[session] = peer
            if len(self._peers) > _PEER_LIMIT:
                self._peers.popitem(last=False)[1].close()
        return peer

    def _parse(self, session: str) -> _Address:
        try:
            boot_id, namespace, pid, start_ticks, page_address, token, *last = session.split(".")
            (permit_server,) = last or [""]
            address = _Address(
                boot_id,
                namespace,
                int(pid),
                int(start_ticks),
                int(page_address, 16),
                bytes.fromhex(token),
                permit_server,
            )
        except ValueError as error:
            raise _unproven("the peer's session does not name a process") from error
        if (address.boot_id, address.pid_namespace) != self._host:
            raise _unproven("the peer is on another host or in another pid namespace")
        return address


def _unproven(detail: str) -> TransferFailed:
    return TransferFailed(detail, metadata={"written_bytes": "0"})


def _host_identity() -> tuple[str, str]:
    """Boot id and pid namespace. Two processes have the same ones exactly when a pid names the same process in both."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"processes of this host cannot prove their identity ({error}): choose another transport"
        ) from error
    return boot_id, namespace
