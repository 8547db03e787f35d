"""What a service process does to itself and to its engine processes around vLLM's start."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
# A thread that wants Python's lock asks for it after so long. The forward pass, the sender and the streams take turns
# many times in a layer, and a layer may take less than the usual 5 ms.
SWITCH_S = 0.0005
# Of glibc's mallopt. The values stand for no trimming, and for no allocation that is mapped by itself.
M_TRIM_THRESHOLD, NEVER = -1, -1
M_MMAP_MAX, NONE = -4, 0


@dataclass(slots=True)
class _Starting:
    parent: int = 0
    keeps_memory: bool = False


_starting = _Starting()


@contextmanager
def engine_children(*, keeps_memory: bool) -> Iterator[None]:
    """Processes forked inside belong to this one: they die with it, and hear none of its terminal's signals.

    With `keeps_memory`, theirs do not return freed memory to the system, but use it again.
    """
    _register_once()
    _starting.parent, _starting.keeps_memory = os.getpid(), keeps_memory
    try:
        yield
    finally:
        _starting.parent = 0


_registered: list[bool] = []


def _register_once() -> None:
    if not _registered:
        os.register_at_fork(after_in_child=_become_engine)
        _registered.append(True)


def _become_engine() -> None:
    parent = _starting.parent
    if not parent:
        return
    # An engine forks its ranks itself, and they belong to it.
    _starting.parent = os.getpid()
    os.setsid()
    sys.setswitchinterval(SWITCH_S)
    # The parent's event loop must not wake for the child's signals.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    if _starting.keeps_memory:
        # Every layer of a forward pass takes and frees the same tens of megabytes, which would be zeroed page by page.
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)
        libc.mallopt(M_MMAP_MAX, NONE)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
        os._exit(1)
