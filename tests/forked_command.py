"""Runs a module with its standard streams in files, as a fork of the fork server: FOLDER MODULE ARGUMENTS."""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace_cli.up.topology import ProcessSpec
from tests.fork_server import forking

_INPUT, _OUTPUT, _ERRORS = "stdin", "stdout", "stderr"


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended."""

    status: int
    out: str
    err: str


async def run_forked(module: str, *arguments: str, stdin: str = "", timeout_s: float) -> Finished:
    """Runs `python -m MODULE ARGUMENTS`, without the time that its imports take."""
    with tempfile.TemporaryDirectory(prefix="headrace-command-") as name:
        folder = Path(name)
        (folder / _INPUT).write_text(stdin)
        command = (sys.executable, "-m", __name__, name, module, *arguments)
        log = folder / "log"
        spec = ProcessSpec(module, module, command, folder / "port", log, {})
        async with forking() as spawn:
            process = await spawn(spec)
            ended = asyncio.create_task(process.wait())
            await asyncio.wait({ended}, timeout=timeout_s)
        out, err = (folder / _OUTPUT).read_text(), (folder / _ERRORS).read_text()
        # The log has what the fork itself could not do.
        err += log.read_text()
        assert ended.done(), f"{arguments} did not end:\n{out}{err}"
        return Finished(ended.result(), out, err)


def main() -> None:
    """Entry point in the fork."""
    folder, module, *arguments = sys.argv[1:]
    created = os.O_WRONLY | os.O_CREAT
    for number, name, flags in (
        (0, _INPUT, os.O_RDONLY),
        (1, _OUTPUT, created),
        (2, _ERRORS, created),
    ):
        descriptor = os.open(Path(folder) / name, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
