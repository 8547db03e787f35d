"""The priority of threads where processors are scarce."""

from __future__ import annotations

import os
import threading
from typing import Final

_NICENESS: Final = 10
"""Beside a thread of normal priority on one processor, it leaves a tenth of the time."""


def lower_priority() -> None:
    """Lowers the priority of the calling thread, and of threads that it starts. It cannot be raised again."""
    # Linux has a priority for each thread. Raising it needs a permission.
    thread_id = threading.get_native_id()
    niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread_id))
    os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
