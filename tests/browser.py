"""A real browser without a window."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

CHROMIUM = "chromium"
BROWSER_S = 60.0


async def browse(url: str, folder: Path) -> str:
    """Opens a page without a window, and returns its document after its scripts have run."""
    browser = shutil.which(CHROMIUM)
    if browser is None:
        pytest.skip(f"needs {CHROMIUM}: apt-get install {CHROMIUM}")
    process = await asyncio.create_subprocess_exec(
        *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder}", "--virtual-time-budget=4000", "--dump-dom", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), BROWSER_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode()
