"""Pastes the blocks of README.md and docs/quickstart.md into a fresh clone: python -m tests.suite.newcomer_walk.

It prints the exit status and the seconds of each command, and ends with 1 when a command failed. A deployment starts in
a terminal of its own, and ends with Ctrl-C before the next one starts. Ports 7050 to 7060 must be free. An argument
names an existing folder for the clone and the logs, which then stay.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.documented import blocks_of
from tests.unit.test_architecture import ROOT

PAGES: Final = ("README.md", "docs/quickstart.md")
READY: Final = "Ctrl-C"
READY_S: Final = 300.0
# `make setup` and `make demo` install packages.
COMMAND_S: Final = 1_800.0
END_S: Final = 60.0
_POLL_S: Final = 0.2
_STARTS: Final = re.compile(r"(?:make up|\S*headrace up)\b")
_PYTHON: Final = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHOWN_LINES: Final = 15
# make, and the shell, after SIGINT.
_INTERRUPTED: Final = (0, 2, 130, -int(signal.SIGINT))


@dataclass
class Walk:
    """One newcomer in one clone."""

    clone: Path
    environment: dict[str, str]
    failures: int = 0
    log_number: int = 0
    deployment: subprocess.Popen[bytes] | None = None
    output: list[str] = field(default_factory=list)

    def run(self, where: str, command: str) -> None:
        """Runs a command to its end, or a deployment until it serves."""
        start_s = time.monotonic()
        if _STARTS.match(command):
            self.interrupt()
            status, log = self._start(command)
        else:
            status, log = self._run(command)
        self._report(where, command, status, time.monotonic() - start_s, log, (0,))

    def interrupt(self) -> None:
        """Ends the deployment as Ctrl-C does."""
        process, self.deployment = self.deployment, None
        if process is None:
            return
        start_s = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        took_s = time.monotonic() - start_s
        self._report("", "Ctrl-C", process.returncode, took_s, None, _INTERRUPTED)

    def _run(self, command: str) -> tuple[int, Path]:
        log = self._new_log()
        with log.open("wb") as output:
            ended = subprocess.run(
                ["timeout", str(COMMAND_S), "bash", "-c", command],
                cwd=self.clone,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        return ended.returncode, log

    def _start(self, command: str) -> tuple[int, Path]:
        log = self._new_log()
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.clone,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.deployment = process
        deadline_s = time.monotonic() + READY_S
        while READY not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline_s:
                return process.poll() or 124, log
            time.sleep(_POLL_S)
        return 0, log

    def _new_log(self) -> Path:
        self.log_number += 1
        return self.clone.parent / f"{self.log_number}.log"

    def _report(
        self,
        where: str,
        command: str,
        status: int,
        took_s: float,
        log: Path | None,
        expected: tuple[int, ...],
    ) -> None:
        print(f"{where:<22} {status:>4} {took_s:>8.1f} s  {command.splitlines()[0]}", flush=True)
        if status in expected:
            return
        self.failures += 1
        if log is not None:
            lines = log.read_text(errors="replace").splitlines()
            print(*(f"    {line}" for line in lines[-_SHOWN_LINES:]), sep="\n", flush=True)


def commands_of(page: Path) -> Iterator[tuple[int, str]]:
    """The commands of all blocks in their order, by line. A block of Python is one command."""
    found = [(block.line, command) for block in blocks_of(page) for command in block.commands]
    text = page.read_text(encoding="utf-8")
    for block in _PYTHON.finditer(text):
        line = text.count("\n", 0, block.start(1)) + 1
        found.append((line, f".venv/bin/python - <<'PYTHON'\n{block[1]}PYTHON"))
    yield from sorted(found, key=lambda one: one[0])


def walk(folder: Path) -> int:
    """The number of commands that failed."""
    clone = folder / "headrace"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    home = folder / "home"
    home.mkdir()
    one = Walk(clone, {**kept, "HOME": str(home)})
    print(f"{'page':<22} exit  seconds    command")
    try:
        for name in PAGES:
            for line, command in commands_of(clone / name):
                one.run(f"{name}:{line}", command)
    finally:
        one.interrupt()
    return one.failures


def main() -> int:
    """Returns 1 when a command failed."""
    if len(sys.argv) > 1:
        return int(walk(Path(sys.argv[1])) > 0)
    with tempfile.TemporaryDirectory(prefix="headrace-walk-") as folder:
        return int(walk(Path(folder)) > 0)


if __name__ == "__main__":
    sys.exit(main())
