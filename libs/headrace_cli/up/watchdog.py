"""Ends the children of `headrace up` if `headrace up` itself is killed.

Reads lines from stdin: "+ID" adds a process group, "-ID" removes it. Stdin ends with the parent. Then
every remaining group gets SIGTERM, and SIGKILL after a grace. A group includes the processes that an
engine started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

TERM_GRACE_S = 10.0
POLL_S = 0.1


def watch() -> None:
    """Returns when all groups have ended or were killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    groups = _signal_groups(groups, signal.SIGTERM)
    deadline_s = time.monotonic() + TERM_GRACE_S
    while groups and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        groups = _signal_groups(groups, 0)
    _signal_groups(groups, signal.SIGKILL)


def _signal_groups(groups: set[int], number: int) -> set[int]:
    """Sends the signal and returns the groups that exist."""
    alive: set[int] = set()
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            alive.add(group)
    return alive


if __name__ == "__main__":
    watch()
