"""Signals during the start of a process: it ends, and prints no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# It takes the place of a package that the process imports, and stays in its import.
SLOW_IMPORT = """
import pathlib, time
pathlib.Path(__file__).with_name("begun").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("module", "package"),
    [("headrace_cli", "rich"), ("headrace_decode", "uvloop"), ("headrace_router", "uvloop")],
)
def test_ctrl_c_during_imports_prints_nothing(tmp_path: Path, module: str, package: str) -> None:
    (tmp_path / f"{package}.py").write_text(SLOW_IMPORT)
    process = _start([module], PYTHONPATH=_path(str(tmp_path)))
    _wait_for(process, tmp_path / "begun")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert err == ""
    assert process.returncode == -signal.SIGINT


def test_termination_while_waiting_for_the_registry_is_quiet(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    flags = ["--engine=sim", "--transport=in_memory", "--worker-id=d", "--registry=127.0.0.1:1"]
    process = _start(["headrace_decode", *flags, f"--port-file={port_file}"])
    _wait_for(process, port_file)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    assert "closed" not in err


def _start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As for a command in the foreground of a terminal.
        preexec_fn=_restore_sigint,  # noqa: PLW1509 - this process has no other threads yet
    )


def _restore_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _path(first: str) -> str:
    return os.pathsep.join([first, *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _wait_for(process: subprocess.Popen[str], file: Path) -> None:
    limit_s = time.monotonic() + 60
    while not file.exists():
        if process.poll() is not None or time.monotonic() > limit_s:
            process.kill()
            raise AssertionError(f"{file} was not made: {process.communicate()}")
        time.sleep(0.02)
