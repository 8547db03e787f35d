"""A real browser without a window."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

CHROMIUM = "chromium"
BROWSER_S = 60.0


def browser() -> str:
    found = shutil.which(CHROMIUM)
    if found is None:
        pytest.skip(f"needs {CHROMIUM}: apt-get install {CHROMIUM}")
    return found


async def browse(url: str, folder: Path, *arguments: str) -> str:
    """Opens a page without a window, and returns its document after its scripts have run."""
    command = [
        browser(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
    ]
    command += [
        f"--user-data-dir={folder}",
        "--virtual-time-budget=4000",
        *arguments,
        "--dump-dom",
        url,
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), BROWSER_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode()
