"""Reads and writes the memory of another process by process_vm_readv and process_vm_writev."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import threading
from pathlib import Path

import numpy as np

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.plan.copy_plan import Int64Array, Runs
from headrace_kv.transport.packing import Bytes

ENTRIES_PER_CALL = 1024
"""The kernel's IOV_MAX."""

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_START_TIME_FIELD = 19  # of /proc/<pid>/stat, counted after the name in brackets


def _load(name: str) -> ctypes._NamedFuncPointer:
    library = ctypes.CDLL(None, use_errno=True)
    try:
        function = getattr(library, name)
    except AttributeError as error:
        raise ConfigError(f"this system's C library has no {name}") from error
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    function.restype = ctypes.c_ssize_t
    return function  # type: ignore[no-any-return]


class _Pidfds:
    """One descriptor per process, shared by all transports. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By pid and start time: the descriptor and its use count.
        self._held: dict[tuple[int, int], tuple[int, int]] = {}

    def open(self, pid: int, start_ticks: int) -> int:
        """Raises TransferFailed unless the process that started then is there."""
        key = (pid, start_ticks)
        with self._lock:
            pidfd, count = self._held.get(key, (-1, 0))
            if not count:
                pidfd = _open_pidfd(pid, start_ticks)
            self._held[key] = (pidfd, count + 1)
        return pidfd

    def close(self, pid: int, start_ticks: int) -> None:
        """Call it once for each `open`."""
        key = (pid, start_ticks)
        with self._lock:
            pidfd, count = self._held.pop(key)
            if count > 1:
                self._held[key] = (pidfd, count - 1)
            else:
                os.close(pidfd)


def _open_pidfd(pid: int, start_ticks: int) -> int:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise _failure(error.errno or 0, pid, "opened") from error
    try:
        if start_time_ticks(pid) != start_ticks:
            raise TransferFailed(f"process {pid} is not the one that was described")
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


_PIDFDS = _Pidfds()


class ProcessMemory:
    """The memory of one process. A pidfd guards against a recycled pid.

    Raises TransferFailed when no process with this pid started at `start_ticks`.
    """

    def __init__(self, pid: int, start_ticks: int) -> None:
        self._pid = pid
        self._read = _load("process_vm_readv")
        self._write = _load("process_vm_writev")
        self._start_ticks = start_ticks
        self._poll = select.poll()
        self._poll.register(_PIDFDS.open(pid, start_ticks), select.POLLIN)

    def close(self) -> None:
        """Releases the pidfd. Call it once."""
        _PIDFDS.close(self._pid, self._start_ticks)

    def require_alive(self) -> None:
        """Raises TransferFailed once the process has ended. Until then its pid is not reused."""
        if self._poll.poll(0):
            raise _failure(errno.ESRCH, self._pid, "reached")

    def read(self, address: int, nbytes: int) -> bytes:
        """Copies [address, address + nbytes) from the process. Raises TransferFailed."""
        buffer = np.empty(nbytes, np.uint8)
        local = np.array([buffer.ctypes.data, nbytes], np.uint64)
        remote = np.array([address, nbytes], np.uint64)
        done = self._read(self._pid, local.ctypes.data, 1, remote.ctypes.data, 1, 0)
        if done != nbytes:
            raise _failure(ctypes.get_errno() if done < 0 else errno.EFAULT, self._pid, "read")
        return buffer.tobytes()

    def gather(self, addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
        """As packing.gather, from the process. Raises TransferFailed."""
        done = 0
        for first in range(0, len(lengths), ENTRIES_PER_CALL):
            part = slice(first, first + ENTRIES_PER_CALL)
            remote = _vectors(addresses[part], lengths[part])
            total = int(lengths[part].sum())
            local = np.array([target[done:].ctypes.data, total], np.int64)
            read = self._read(self._pid, local.ctypes.data, 1, remote.ctypes.data, len(remote), 0)
            if read != total:
                raise _failure(ctypes.get_errno() if read < 0 else errno.EFAULT, self._pid, "read")
            done += total

    def write(self, runs: Runs) -> None:
        """Copies up to ENTRIES_PER_CALL runs into the process. Continues after a partial copy.

        Raises TransferFailed; its metadata has the landed bytes as `written_bytes`.
        """
        local = _vectors(runs.source_addresses, runs.lengths)
        remote = _vectors(runs.destination_addresses, runs.lengths)
        total = runs.payload_bytes
        written = 0
        while written < total:
            done = int(
                self._write(
                    self._pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
                )
            )
            if done <= 0:
                code = ctypes.get_errno() if done < 0 else errno.EFAULT
                raise _failure(code, self._pid, "written", written)
            written += done
            if written < total:
                local, remote = _without(local, done), _without(remote, done)


def _vectors(
    addresses: np.ndarray[tuple[int], np.dtype[np.int64]],
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """An array of struct iovec, shape [run, 2]: address and length."""
    vectors = np.empty((len(addresses), 2), np.int64)
    vectors[:, 0] = addresses
    vectors[:, 1] = lengths
    return vectors


def _without(
    vectors: np.ndarray[tuple[int, int], np.dtype[np.int64]], nbytes: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """The vectors without their first `nbytes` bytes."""
    ends = np.cumsum(vectors[:, 1])
    first = int(np.searchsorted(ends, nbytes, side="right"))
    rest = vectors[first:].copy()
    begun = nbytes - (int(ends[first - 1]) if first else 0)
    rest[0] += (begun, -begun)
    return rest


def start_time_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot. Raises TransferFailed when that is unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        raise _failure(error.errno or 0, pid, "looked at") from error
    return int(text.rpartition(")")[2].split()[_START_TIME_FIELD])


def tracing_scope() -> int:
    """Yama's ptrace_scope: 0 (or no Yama) leaves it to user ids, 1 asks the target for permission, more forbids."""
    return int(_YAMA.read_text()) if _YAMA.exists() else 0


def _failure(code: int, pid: int, action: str, written_bytes: int = 0) -> TransferFailed:
    remedies = {
        errno.ESRCH: "it has ended",
        errno.EPERM: "permission is refused (another user, or Yama's ptrace_scope)",
        errno.EFAULT: "an address is not mapped",
    }
    metadata = {"errno": errno.errorcode.get(code, str(code))}
    # Without `written_bytes` no other transport is tried: none reaches the memory of a process that has ended.
    if code != errno.ESRCH:
        metadata["written_bytes"] = str(written_bytes)
    reason = remedies.get(code) or os.strerror(code)
    return TransferFailed(f"process {pid} cannot be {action}: {reason}", metadata=metadata)
