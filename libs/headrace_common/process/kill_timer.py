"""A timer of the kernel that ends this process, also while the process stands still."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from typing import Final

from headrace_common.errors import ConfigError

_log = logging.getLogger(__name__)

# Counts while the machine is suspended, unlike CLOCK_MONOTONIC.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_SIGEV_SIGNAL = 0
_TIMER_ABSTIME = 1
_SIG_ERR = -1
_NANOSECONDS = 1_000_000_000


def boottime_s() -> float:
    """Seconds since the machine's boot, suspended time included. The clock of every KillTimer."""
    return time.clock_gettime(_CLOCK)


class _SignalEvent(ctypes.Structure):
    """struct sigevent."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal_number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class KillTimer:
    """Sends SIGKILL to this process at the earliest of the deadlines that are set. Any thread may call its methods.

    A stopped process (SIGSTOP) and one in a frozen cgroup of version 2 end at the deadline. In a frozen cgroup of
    version 1, and on a suspended machine, the process ends before it executes another instruction of its own.

    The kernel never sends SIGKILL to process 1 of a container for its own timer. That process gets a signal with a
    handler that exits at once. When it was stopped, its other threads may run for some microseconds before that.
    """

    def __init__(self) -> None:
        """Raises ConfigError when the kernel gives the process no timer."""
        self._lock = threading.Lock()
        self._deadlines: dict[object, float] = {}
        self._armed_s = 0.0
        self._library = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(None, self._fatal_signal(), _SIGEV_SIGNAL, b"")
        if self._library.timer_create(_CLOCK, ctypes.byref(event), ctypes.byref(self._timer)) != 0:
            raise ConfigError(
                "the kernel gives this process no timer, which must end a frozen sender "
                f"({os.strerror(ctypes.get_errno())}): raise the limit on pending signals (ulimit -i)"
            )

    def set(self, owner: object, deadline_s: float) -> None:
        """Sets the owner's deadline, by `boottime_s`. One that has passed ends the process at once."""
        with self._lock:
            self._deadlines[owner] = deadline_s
            self._arm(min(self._deadlines.values()))

    def clear(self, owner: object) -> None:
        """Removes the owner's deadline, if it has one."""
        with self._lock:
            if self._deadlines.pop(owner, None) is not None:
                self._arm(min(self._deadlines.values(), default=0.0))

    def _arm(self, deadline_s: float) -> None:
        if deadline_s == self._armed_s:
            return
        # Zero would disarm the timer, and negative times are invalid.
        at_ns = max(1, int(deadline_s * _NANOSECONDS)) if deadline_s else 0
        # struct itimerspec: no interval, then the time.
        spec = (ctypes.c_long * 4)(0, 0, *divmod(at_ns, _NANOSECONDS))
        if self._library.timer_settime(self._timer, _TIMER_ABSTIME, spec, None) != 0:
            raise OSError(ctypes.get_errno(), "the timer that ends a frozen sender is not set")
        self._armed_s = deadline_s

    def _fatal_signal(self) -> int:
        """The signal that ends this process."""
        if os.getpid() != 1:
            return signal.SIGKILL
        _log.warning(
            "this process is process 1 of its container: start the container with an init process, so that the kernel "
            "can end a frozen sender without delay"
        )
        number = int(signal.SIGRTMAX)
        exits_at_once = ctypes.cast(getattr(self._library, "_exit"), ctypes.c_void_p)  # noqa: B009
        if self._library.signal(number, exits_at_once) == _SIG_ERR:
            raise ConfigError("the signal that ends a frozen sender has no handler")
        return number
