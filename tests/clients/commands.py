"""Runs the programs of clients."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

TIMEOUT_S = 150.0
# Of the machine that runs the tests. A client must not use them.
_PREFIX = "HEADRACE_"


async def run(*command: str, **environment: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command. `environment` adds variables."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**_inherited(), **environment},
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def _inherited() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
