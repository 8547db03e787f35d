"""A real browser without a window."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = "chromium"
BROWSER_S = 60.0
_POLL_S = 0.05
_MESSAGE_BYTES_MAX = 16 * 1024 * 1024


def browser() -> str:
    found = shutil.which(CHROMIUM)
    if found is None:
        pytest.skip(f"needs {CHROMIUM}: apt-get install {CHROMIUM}")
    return found


def _command(folder: Path) -> list[str]:
    return [
        *(browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        f"--user-data-dir={folder}",
    ]


async def browse(url: str, folder: Path, *arguments: str) -> str:
    """Opens a page without a window, and returns its document after its scripts have run."""
    command = [*_command(folder), "--virtual-time-budget=4000", *arguments, "--dump-dom", url]
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


class Page:
    """A page of a browser that is driven by its DevTools protocol: JSON messages that end with a zero byte."""

    def __init__(self, reader: asyncio.StreamReader, commands: int) -> None:
        self._reader = reader
        self._commands = commands
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    async def open(self, width_px: int, height_px: int) -> None:
        """Makes the page with the width of a phone's screen. Windows cannot be as narrow."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = {"sessionId": attached["sessionId"]}
        size = {"width": width_px, "height": height_px}
        await self.call(
            "Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=True
        )

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits until a JavaScript expression is true."""
        while not await self.value(expression):
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def phone(url: str, folder: Path, width_px: int, height_px: int = 720) -> AsyncIterator[Page]:
    """A page on a narrow screen. The browser ends after BROWSER_S."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script, *_command(folder), "--remote-debugging-pipe"),
        pass_fds=(theirs_in, theirs_out),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    reader = asyncio.StreamReader(limit=_MESSAGE_BYTES_MAX)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb", buffering=0)
    )
    try:
        async with asyncio.timeout(BROWSER_S):
            page = Page(reader, ours_out)
            await page.open(width_px, height_px)
            await page.call("Page.navigate", url=url)
            yield page
    finally:
        transport.close()
        os.close(ours_out)
        if process.returncode is None:
            process.kill()
        await process.wait()
