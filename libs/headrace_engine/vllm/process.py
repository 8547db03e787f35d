"""What a service process does to itself and to its engine processes around vLLM's start."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Starting:
    parent: int = 0


_starting = _Starting()


@contextmanager
def engine_children() -> Iterator[None]:
    """Processes forked inside belong to this one: they die with it, and hear none of its terminal's signals."""
    _register_once()
    _starting.parent = os.getpid()
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
    # The parent's event loop must not wake for the child's signals.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
        os._exit(1)
