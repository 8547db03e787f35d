"""The life of the engine's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.pair import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

SERVICE = """
import asyncio, sys
from tests.vllm.pair import engine_config
from headrace_engine.vllm.engine import VllmEngine

async def no_descriptor(ref, deadline):
    raise AssertionError(ref)

async def main():
    engine = VllmEngine(engine_config("decode", num_gpu_blocks_override=16), no_descriptor)
    await engine.start()
    print("started", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await engine.close()

asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="h") as name:
        yield Path(name)


@pytest.fixture
def service(folder: Path) -> subprocess.Popen[str]:
    """A process with an engine, once that has started. It ends when its standard input does."""
    if not MODEL.is_dir():
        pytest.skip(f"the model folder {MODEL} is missing: make model")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TMPDIR": str(folder),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "started":
            break
    assert process.poll() is None, "the engine did not start"
    return process


def wait_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits for processes to end. Returns those that still run."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s and any(process.is_running() for process in processes):
        processes = [
            process
            for process in processes
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]
        time.sleep(0.05)
    return processes


def test_no_engine_process_outlives_its_service(service: subprocess.Popen[str]) -> None:
    with service:
        engines = psutil.Process(service.pid).children(recursive=True)
        try:
            assert engines
            assert all(os.getsid(engine.pid) != os.getsid(service.pid) for engine in engines)
        finally:
            service.send_signal(signal.SIGKILL)
    assert wait_gone(engines, 5.0) == []


def test_a_service_terminates_when_its_engine_dies(service: subprocess.Popen[str]) -> None:
    with service:
        for engine in psutil.Process(service.pid).children(recursive=True):
            engine.kill()
        try:
            assert service.wait(20) == -signal.SIGTERM
        finally:
            service.kill()


def test_an_engine_leaves_no_files(service: subprocess.Popen[str], folder: Path) -> None:
    with service:
        assert list(folder.rglob("*"))
        try:
            service.communicate(timeout=60)
        finally:
            service.kill()
    assert service.returncode == 0
    assert [path for path in folder.rglob("*") if not path.is_dir()] == []
    assert list(folder.glob("headrace-*")) == []


def test_a_rank_that_reports_wrong_ids_ends_no_engine(run_job: RunJob) -> None:
    result = run_job("tests.vllm.wrong_reports:answers", model="tiny-llama")
    assert result["handed_over"] == result["plain"]
    assert result["left_blocks"] == [0, 0]
