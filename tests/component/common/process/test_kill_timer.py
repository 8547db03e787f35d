"""The timer that ends a process which stands still. Each test has processes of its own to end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from headrace_common.process.kill_timer import KillTimer, boottime_s

# Reads deadlines from now in seconds, sets one for each owner, then clears the owners that are named.
PROGRAM = """
import os, signal, sys, threading
from headrace_common.process.kill_timer import KillTimer, boottime_s
timer = KillTimer()
for number, delay_s in enumerate(sys.argv[1].split(",")):
    timer.set(number, boottime_s() + float(delay_s))
for number in sys.argv[2].split(","):
    if number:
        timer.clear(int(number))
print("set", flush=True)
if sys.argv[3] == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
threading.Event().wait(float(sys.argv[4]))
"""
LONG_S, TIMEOUT_S = "30", 20.0


def run_program(*words: str, before: tuple[str, ...] = ()) -> int:
    """The exit status of the program."""
    done = subprocess.run(
        [*before, sys.executable, "-c", PROGRAM, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode


@pytest.mark.parametrize("stop", ["stop", ""])
def test_the_earliest_deadline_ends_the_process_even_when_it_is_stopped(stop: str) -> None:
    assert run_program("60,0.2,60", "", stop, LONG_S) == -signal.SIGKILL


def test_a_deadline_that_has_passed_ends_the_process_at_once() -> None:
    assert run_program("-1", "", "", LONG_S) == -signal.SIGKILL


def test_cleared_deadlines_end_nothing() -> None:
    assert run_program("0.3,0.3", "0,1", "", "0.6") == 0


def test_the_deadlines_that_are_left_count() -> None:
    assert run_program("0.2,0.4", "0", "", LONG_S) == -signal.SIGKILL


@pytest.mark.skipif(not shutil.which("unshare") or os.getuid() != 0, reason="needs root")
def test_process_1_of_a_container_ends_too() -> None:
    """The kernel ignores SIGKILL there."""
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    assert run_program("0.2", "", "", LONG_S, before=unshare) == signal.SIGRTMAX


def test_an_owner_may_have_no_deadline() -> None:
    timer = KillTimer()
    timer.clear("a")
    timer.set("a", boottime_s() + 60.0)
    timer.clear("a")
    timer.clear("a")
