"""A real smg in front of decode workers."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.waiting import until

_START_S = 60.0


def find_smg() -> str:
    """The program, from HEADRACE_TEST_SMG or the path. Empty without one."""
    return os.environ.get("HEADRACE_TEST_SMG", "") or shutil.which("smg") or ""


@asynccontextmanager
async def smg_before(folder: Path, workers: Collection[str]) -> AsyncIterator[str]:
    """Runs smg before HTTP workers at these addresses. Yields its address once it has connected to all."""
    port, metrics_port = free_port(), free_port()
    log = folder / "smg.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(find_smg(), "launch", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(metrics_port), "--policy", "round_robin"),
            *("--worker-urls", *(f"http://{worker}" for worker in workers)),
            stdout=output,
            stderr=output,
        )
    try:
        await until(lambda: _is_ready(port), _START_S, log.read_text, 0.2)
        yield f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), _START_S)


async def _is_ready(port: int) -> bool:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"http://127.0.0.1:{port}/readiness")).is_success
        except httpx.HTTPError:
            return False
