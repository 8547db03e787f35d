"""Services as forks of a process that has already imported them. Under emulation imports take seconds."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.forked import Forked, fork
from tests.rdma.report import LOGS

_POLL_S = 0.02
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


def stop(processes: Sequence[Forked]) -> None:
    """Sends SIGTERM to all. Raises AssertionError unless each then exits with 0."""
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
    for process in processes:
        status = process.wait(STOP_TIMEOUT_S)
        assert status == 0, f"{process.name} ended with status {status}"


def start_service(service: str, name: str, arguments: Sequence[str]) -> Forked:
    """A real service, as its console script would start it."""
    LOGS.mkdir(exist_ok=True)
    _port_file(name).unlink(missing_ok=True)

    def main() -> None:
        sys.argv = [f"headrace-{service}", *arguments, f"--port-file={_port_file(name)}"]
        importlib.import_module(f"headrace_{service}.main").main()

    return fork(name, main, log_of(name))


def start_program(service: str, name: str, arguments: Sequence[str]) -> Forked:
    """The same in a new Python, for services that start processes of their own."""
    LOGS.mkdir(exist_ok=True)
    _port_file(name).unlink(missing_ok=True)
    words = ["-m", f"headrace_{service}", *arguments, f"--port-file={_port_file(name)}"]
    return fork(name, lambda: os.execv(sys.executable, [sys.executable, *words]), log_of(name))


def wait_serving(services: Sequence[Forked], timeout_s: float = START_TIMEOUT_S) -> None:
    """Returns once all serve. Raises AssertionError when one ends before, or they take too long."""
    give_up_s = time.monotonic() + timeout_s
    for service in services:
        while not _port_file(service.name).exists():
            assert service.poll() is None, f"{service.name} ended with status {service.status}"
            assert time.monotonic() < give_up_s, f"{service.name} does not serve"
            time.sleep(_POLL_S)


def log_of(name: str) -> Path:
    """The output of a service."""
    return LOGS / f"{name}.log"


def _port_file(name: str) -> Path:
    return LOGS / f"{name}.port"
