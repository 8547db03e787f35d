"""Lets single processes read and write this one where Yama's ptrace_scope is 1.

The kernel stores one permitted process for each process. Its descendants are permitted too. So while one sender is
connected, that sender is permitted. Of several senders, it is their nearest common ancestor.

A sender asks at a Unix socket in the abstract namespace. The kernel reports its process and user there. It also sends
the random token of the session. It stays permitted until it closes the connection or ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from headrace_common.errors import ConfigError, TransferFailed

_log = logging.getLogger(__name__)

_PR_SET_PTRACER = 0x59616D61
_PARENT_FIELD = 1  # of /proc/<pid>/stat, counted after the name in brackets
_SENDERS_MAX = 1024
_ANSWER_S = 1.0
_PERMITTED = b"+"
_CREDENTIALS = struct.Struct("@3i")  # struct ucred: pid, uid, gid


class TracerPermits:
    """The processes that may read and write this one. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._senders: Counter[int] = Counter()

    def add(self, pid: int) -> None:
        """Permits a process. Call `remove` once for each `add`.

        Raises ConfigError when the kernel refuses, or knows no common ancestor of the permitted processes.
        """
        with self._lock:
            self._permit({*self._senders, pid})
            self._senders[pid] += 1

    def remove(self, pid: int) -> None:
        """Permits a process no more."""
        with self._lock:
            self._senders[pid] -= 1
            self._senders = +self._senders
            try:
                self._permit(self._senders)
            except ConfigError as error:
                _log.warning("process %d stays permitted for a while: %s", pid, error)

    def _permit(self, pids: Iterable[int]) -> None:
        # A sender that has ended has no chain.
        chains = [chain for chain in map(ancestors, pids) if chain]
        first = chains[0] if chains else []
        common = (pid for pid in first if all(pid in chain for chain in chains))
        tracer = next(common, 0)
        if chains and not tracer:
            raise ConfigError("the senders of this host have no common ancestor")
        set_tracer(tracer)


def ancestors(pid: int) -> list[int]:
    """A process and its ancestors, nearest first. Empty for a process that has ended."""
    found: list[int] = []
    while pid and pid not in found:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return found
        found.append(pid)
        pid = int(text.rpartition(")")[2].split()[_PARENT_FIELD])
    return found


def set_tracer(pid: int) -> None:
    """Lets a process and its descendants read and write this one; with 0, none. Raises ConfigError."""
    zeros = [ctypes.c_ulong(0)] * 3
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), *zeros) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"this process cannot let process {pid} write to it: {reason}")


_PERMITS = TracerPermits()


class PermitServer:
    """Permits each process of this user that connects with the token, for as long as it is connected."""

    def __init__(self, token: bytes) -> None:
        self.name = secrets.token_hex(8)
        self._token = token
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self.name))
        self._listener.listen()
        self._closing, self._wake = socket.socketpair()
        self._senders: dict[socket.socket, int] = {}
        self._thread = threading.Thread(target=self._run, name="kv-permits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Withdraws every permission."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._closing:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._closing, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._closing:
                        for connection in list(self._senders):
                            self._remove(connection)
                        return
                    if key.fileobj is self._listener:
                        accepted = self._accept()
                        if accepted is not None:
                            selector.register(accepted, selectors.EVENT_READ)
                        continue
                    # A sender sends nothing more: it has closed its connection.
                    selector.unregister(key.fileobj)
                    assert isinstance(key.fileobj, socket.socket)
                    self._remove(key.fileobj)

    def _accept(self) -> socket.socket | None:
        """A connection that is permitted from now on; None if it was refused."""
        connection, _ = self._listener.accept()
        try:
            connection.settimeout(_ANSWER_S)
            pid = self._require_sender(connection)
            _PERMITS.add(pid)
        except (OSError, ConfigError) as error:
            _log.warning("a process of this host may not write to this one: %s", error)
            connection.close()
            return None
        self._senders[connection] = pid
        with contextlib.suppress(OSError):
            connection.sendall(_PERMITTED)
        return connection

    def _require_sender(self, connection: socket.socket) -> int:
        """The process at the other end. Raises ConfigError or OSError for one that is not permitted."""
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid, uid = map(int, _CREDENTIALS.unpack(credentials)[:2])
        if uid != os.geteuid() or pid <= 0:
            raise ConfigError(f"process {pid} is another user's, or in another pid namespace")
        token = connection.recv(len(self._token), socket.MSG_WAITALL)
        if not hmac.compare_digest(token, self._token):
            raise ConfigError(f"process {pid} sent a wrong token")
        if len(self._senders) >= _SENDERS_MAX:
            raise ConfigError(f"{_SENDERS_MAX} senders are permitted already")
        return pid

    def _remove(self, connection: socket.socket) -> None:
        connection.close()
        _PERMITS.remove(self._senders.pop(connection))


class Permit:
    """The permission to write to the process behind a PermitServer. Raises TransferFailed when it is refused."""

    def __init__(self, name: str, token: bytes) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(_ANSWER_S)
        try:
            self._connection.connect(_address(name))
            self._connection.sendall(token)
            permitted = self._connection.recv(len(_PERMITTED)) == _PERMITTED
        except OSError as error:
            self._connection.close()
            raise _refused(str(error)) from error
        if not permitted:
            self._connection.close()
            raise _refused("it has refused")

    def close(self) -> None:
        """Gives the permission back."""
        self._connection.close()


def _address(name: str) -> str:
    """In the abstract namespace: no file is left behind."""
    return f"\0headrace-kv-{name}"


def _refused(reason: str) -> TransferFailed:
    return TransferFailed(
        f"the peer does not permit this process to write to it: {reason}",
        metadata={"written_bytes": "0"},
    )
