"""A process that detects when the whole machine stands still while tests run.

It sleeps for a moment, again and again. It reports when it woke late, and when the hypervisor gave much of a second
to other machines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

BEARABLE_S = 0.2
"""A later wake-up is reported. Where a machine is only busy, a process that mostly sleeps wakes within 0.1 s."""
BEARABLE_SHARE = 0.4
"""Share of the processors' time in a second that other machines got. A fifth is usual for hours."""
_TICK_S = 0.02
_SAMPLE_S = 1.0


class MachineWatch:
    """Starts the process."""

    def __init__(self) -> None:
        command = (sys.executable, "-I", __file__, str(os.getpid()))
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self._reports = self.process.stdout
        # The first line means that the process is watching.
        self._reports.readline()
        os.set_blocking(self._reports.fileno(), False)

    def lost_s(self) -> float:
        """The time that the machine lost since the last call."""
        return sum(float(line) for line in (self._reports.read() or b"").split())

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        self._reports.close()


def _stolen() -> tuple[int, int]:
    """Ticks of all processors: those given to other machines, and all of them (Linux, proc_stat(5))."""
    all_processors = Path("/proc/stat").read_text("ascii").split("\n", 1)[0]
    ticks = [int(word) for word in all_processors.split()[1:9]]
    return ticks[-1], sum(ticks)


def _watch(parent: int) -> None:
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
    _watch(int(sys.argv[1]))
