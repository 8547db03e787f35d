"""A wall clock that a test shifts, for processes with a preloaded library."""

from __future__ import annotations

import mmap
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

from headrace_cli.up.supervisor import ChildProcess, Spawn, spawn_program
from headrace_cli.up.topology import ProcessSpec


class ShiftedClock:
    """The wall clock of the processes that are started with `environment`."""

    def __init__(self, library: Path, folder: Path, offset_s: float) -> None:
        path = folder / "clock"
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._shift = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "HEADRACE_TEST_CLOCK_FILE": str(path)}
        self.set(offset_s)

    def set(self, offset_s: float) -> None:
        """Sets the offset from this machine's clock."""
        self._shift[:] = struct.pack("=q", round(offset_s * 1e9))

    def shifting(self, spawn: Spawn, service: str) -> Spawn:
        """A spawn that gives the processes of one service this clock, in programs of their own."""

        async def start(spec: ProcessSpec) -> ChildProcess:
            if spec.service != service:
                return await spawn(spec)
            environment = {**spec.environment, **self.environment}
            return await spawn_program(replace(spec, environment=environment))

        return start


def compile_clock_shim(folder: Path) -> Path:
    """The compiled clock_shim.c."""
    path = folder / "clock_shim.so"
    source = Path(__file__).with_name("clock_shim.c")
    flags = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", str(path), str(source), "-ldl"], check=True, timeout=60)
    return path
