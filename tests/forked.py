"""Forked processes. A fork shares the modules that its parent has imported.

A process must fork before it uses gRPC or loads Mooncake, because both start threads.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.02
_SERVICES = ("registry", "router", "prefill", "decode", "worker", "planner_service")


def import_services() -> None:
    """Imports the services, so that forks need not import them."""
    for service in _SERVICES:
        importlib.import_module(f"headrace_{service}.main")
    importlib.import_module("headrace_engine.sim.engine")
    importlib.import_module("headrace_cli.client")
    importlib.import_module("headrace_cli.app")


@dataclass(slots=True)
class Forked:
    """A forked process."""

    name: str
    pid: int
    status: int | None = None

    def poll(self) -> int | None:
        """The exit status once it has ended, else None."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self, timeout_s: float) -> int:
        """Returns the exit status. After `timeout_s` it kills the process and raises TimeoutError."""
        give_up_s = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > give_up_s:
                self.kill()
                raise TimeoutError(f"{self.name} did not end within {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        """Kills the process, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork(name: str, main: Callable[[], None], log: Path | None = None) -> Forked:
    """Runs `main` in a fork, with its output in `log`. The fork exits with status 0 when `main` returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(name, pid)
    status = 1
    try:
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
