"""The process of a worker that gets a signal while its model loads."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("loading_worker.py")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_worker_while_its_model_loads(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # A worker connects to its registry before it loads a model. This one accepts connections, and does nothing.
    with socket.create_server(("127.0.0.1", 0)) as registry:
        address = f"--registry=127.0.0.1:{registry.getsockname()[1]}"
        flags = ("--model=none", "--worker-id=prefill-0", address)
        await _ends_while_loading(number, flags, environment)


async def _ends_while_loading(
    number: signal.Signals, flags: tuple[str, ...], environment: dict[str, str]
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line == b"loading\n"
        process.send_signal(number)
        out, err = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, out) == (128 + number, b"ended\n"), err
    assert b"Traceback" not in err
