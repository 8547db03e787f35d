"""A process that looks on while tests run, and tells when the machine itself stood still.

It knows nothing of the tests: it sleeps for a moment, again and again, and tells when it woke late, and when the
hypervisor gave much of a second to somebody else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

BEARABLE_S = 0.2
"""Waking later than this is told: where a machine is only busy, a process that mostly sleeps wakes within 0.1 s."""
BEARABLE_SHARE = 0.4
"""Of the processors' time in a second, given to other machines: a fifth is usual for hours."""
_TICK_S = 0.02
_SAMPLE_S = 1.0


class MachineWatch:
    """Starts the process."""

    def __init__(self) -> None:
        command = (sys.executable, "-I", __file__, str(os.getpid()))
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self._told = self.process.stdout
        # Its first line says that it looks on.
        self._told.readline()
        os.set_blocking(self._told.fileno(), False)

    def lost_s(self) -> float:
        """The time that the machine lost since the last call."""
        return sum(float(line) for line in (self._told.read() or b"").split())

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        self._told.close()


def _stolen() -> tuple[int, int]:
    """Ticks of all processors: given to other machines, and in all (Linux, proc_stat(5))."""
    all_processors = Path("/proc/stat").read_text("ascii").split("\n", 1)[0]
    ticks = [int(word) for word in all_processors.split()[1:9]]
    return ticks[-1], sum(ticks)


def _look_on(parent: int) -> None:
    last, sampled_s = _stolen(), time.monotonic()
    now_s = sampled_s
    print(0.0, flush=True)
    while os.getppid() == parent:
        time.sleep(_TICK_S)
        before_s, now_s = now_s, time.monotonic()
        if (late_s := now_s - before_s - _TICK_S) >= BEARABLE_S:
            print(f"{late_s:.3f}", flush=True)
        if now_s - sampled_s >= _SAMPLE_S:
            stolen = _stolen()
            share = (stolen[0] - last[0]) / max(1, stolen[1] - last[1])
            if share >= BEARABLE_SHARE:
                print(f"{share * (now_s - sampled_s):.3f}", flush=True)
            last, sampled_s = stolen, now_s


if __name__ == "__main__":
    _look_on(int(sys.argv[1]))
