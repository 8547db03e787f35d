"""Settings of the engine processes that a service forks: signals, memory, and their end with the service."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
# A thread requests Python's global lock after this time. Forward pass, sender and streams alternate several times in
# a layer, and a layer may take less than the default of 5 ms.
SWITCH_S = 0.0005
# Parameters of glibc's mallopt. The values disable trimming and separately mapped allocations.
M_TRIM_THRESHOLD, NEVER = -1, -1
M_MMAP_MAX, NONE = -4, 0


class _ForkHook:
    """Sets up each process that is forked while it is enabled."""

    def __init__(self) -> None:
        self._registered = False
        self._parent_pid = 0
        self._keeps_memory = False

    def enable(self, keeps_memory: bool) -> None:
        if not self._registered:
            os.register_at_fork(after_in_child=self._set_up_child)
            self._registered = True
        self._parent_pid, self._keeps_memory = os.getpid(), keeps_memory

    def disable(self) -> None:
        self._parent_pid = 0

    def _set_up_child(self) -> None:
        parent_pid = self._parent_pid
        if not parent_pid:
            return
        # The engine forks its ranks itself, and they end with the engine.
        self._parent_pid = os.getpid()
        os.setsid()
        sys.setswitchinterval(SWITCH_S)
        # The child's signals must not wake the parent's event loop.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        libc = ctypes.CDLL(None, use_errno=True)
        if self._keeps_memory:
            # Every layer of a forward pass allocates and frees tens of megabytes. Pages that were returned to the
            # system would be zeroed again.
            libc.mallopt(M_TRIM_THRESHOLD, NEVER)
            libc.mallopt(M_MMAP_MAX, NONE)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent_pid:
            os._exit(1)


_fork_hook = _ForkHook()


@contextmanager
def engine_children(*, keeps_memory: bool) -> Iterator[None]:
    """Processes forked inside end with this one, and get no signals of its terminal.

    With `keeps_memory`, they reuse freed memory instead of returning it to the system.
    """
    _fork_hook.enable(keeps_memory)
    try:
        yield
    finally:
        _fork_hook.disable()
