"""Ends what `headrace up` started, should `headrace up` itself be killed.

Reads lines from stdin: "+ID" for a process group to end, "-ID" for one that has ended. When stdin
ends, the parent is gone: every group left gets SIGTERM, then SIGKILL. Groups take along whatever an
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
    """Returns when nothing is left to end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    groups = _signalled(groups, signal.SIGTERM)
    give_up = time.monotonic() + TERM_GRACE_S
    while groups and time.monotonic() < give_up:
        time.sleep(POLL_S)
        groups = _signalled(groups, 0)
    _signalled(groups, signal.SIGKILL)


def _signalled(groups: set[int], number: int) -> set[int]:
    """Sends the signal; the groups that were still there."""
    alive: set[int] = set()
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            alive.add(group)
    return alive


if __name__ == "__main__":
    watch()
