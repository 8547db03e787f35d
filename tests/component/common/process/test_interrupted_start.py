"""Signals during the start of a process: it ends, and prints no traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# It takes the place of a package that the process imports, and stays in its import.
SLOW_IMPORT = """
import pathlib, time
pathlib.Path(__file__).with_name("begun").touch()
time.sleep(60)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts modules. No process outlives the test."""
    with ExitStack() as stack:

        def begin(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
            process = stack.enter_context(_start(arguments, **environment))
            stack.callback(process.kill)
            return process

        yield begin


DECODE = ("--model=sim", "--worker-id=d")


@pytest.mark.parametrize(
    ("module", "package"), [("headrace_cli", "rich"), ("headrace_decode", "uvloop")]
)
def test_ctrl_c_during_imports_prints_nothing(
    start: Start, tmp_path: Path, module: str, package: str
) -> None:
    (tmp_path / f"{package}.py").write_text(SLOW_IMPORT)
    process = start([module], PYTHONPATH=_path(str(tmp_path)))
    _wait_for(process, tmp_path / "begun")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert err == ""
    assert process.returncode == -signal.SIGINT


def test_termination_while_the_registry_is_silent_is_quiet(start: Start, tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        registry = f"--registry=127.0.0.1:{silent.getsockname()[1]}"
        process = start(["headrace_decode", *DECODE, registry, f"--port-file={port_file}"])
        _wait_for_call(silent)
        _end_quietly(process)
    # Only a worker that has registered serves.
    assert not port_file.exists()


def test_a_worker_without_a_registry_ends_before_it_loads_a_model(start: Start) -> None:
    flags = ("--worker-id=d", "--model=/nowhere", "--registry=127.0.0.1:1")
    process = start(["tests.component.common.process.impatient_decode", *flags])
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2, err
    assert "the registry on 127.0.0.1:1 is not reachable" in err.splitlines()[-1]
    assert "nowhere" not in err


def _wait_for_call(server: socket.socket) -> None:
    """Returns when a client has sent the preface of HTTP/2."""
    server.settimeout(30.0)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(30.0)
            if connection.recv(3) == b"PRI":
                return


def _end_quietly(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    assert "closed" not in err


def _start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        # As for a command in the foreground of a terminal. No preexec_fn: it forks this process with its threads.
        ["env", "--default-signal=INT", sys.executable, "-m", *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _path(first: str) -> str:
    return os.pathsep.join([first, *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _wait_for(process: subprocess.Popen[str], file: Path) -> None:
    limit_s = time.monotonic() + 60
    while not file.exists():
        if process.poll() is not None or time.monotonic() > limit_s:
            process.kill()
            raise AssertionError(f"{file} was not made: {process.communicate()}")
        time.sleep(0.02)
