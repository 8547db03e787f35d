"""Runs examples as users do."""

from __future__ import annotations

import asyncio
import sys

from tests.unit.test_architecture import ROOT

_LIMIT_S = 60.0


async def run_example(name: str, listen: str) -> str:
    """What an example prints. `listen`: of the OpenAI HTTP API."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "examples" / name), f"http://{listen}/v1"),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    assert process.returncode == 0
    return output.decode()
