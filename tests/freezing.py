"""Stops processes, which keep their memory and their connections."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

_LIMIT_S: Final = 20.0
_POLL_S: Final = 0.001
_STANDING: Final = frozenset("TtZX")
"""States of threads that execute nothing: stopped, traced, and ended."""


def freeze(*process_ids: int) -> None:
    """Stops processes. Returns once none of their threads executes anything.

    SIGSTOP alone is not enough: the others of a process run on until one thread has received the signal, for which that
    thread may wait for a core.
    """
    for process_id in process_ids:
        os.kill(process_id, signal.SIGSTOP)
    end_s = time.monotonic() + _LIMIT_S
    for process_id in process_ids:
        while not _states(process_id) <= _STANDING:
            assert time.monotonic() < end_s, f"process {process_id} has not stopped"
            time.sleep(_POLL_S)


def thaw(*process_ids: int) -> None:
    """Lets stopped processes continue."""
    for process_id in process_ids:
        os.kill(process_id, signal.SIGCONT)


def _states(process_id: int) -> set[str]:
    """The states of the threads of a process, as in proc(5)."""
    states: set[str] = set()
    for stat in Path(f"/proc/{process_id}/task").glob("*/stat"):
        try:
            # The name of the thread, in parentheses, may contain anything.
            states.add(stat.read_text(encoding="utf-8").rpartition(") ")[2][0])
        except (FileNotFoundError, ProcessLookupError):
            # The thread has ended since it was listed.
            continue
    return states
