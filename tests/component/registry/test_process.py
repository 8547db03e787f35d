"""The process of the registry: its end, and a start without its store."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.registry.v1 import registry_pb2
from tests.component.registry.harness import EtcdServer, registry_stub
from tests.ports import free_port


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-m", "headrace_registry", *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("kind", ["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
async def test_the_registry_serves_and_ends_at_once_on_sigterm(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = "memory"
    if kind == "etcd":
        etcd: EtcdServer = request.getfixturevalue("shared_etcd")
        store = f"etcd://127.0.0.1:{etcd.port}"
    port_file = tmp_path / "port"
    process = start(
        "--internal-listen", "127.0.0.1:0", "--port-file", str(port_file), "--store", store
    )
    try:
        for _ in range(300):
            if port_file.exists():
                break
            assert process.poll() is None, process.communicate()[1]
            await asyncio.sleep(0.1)
        async with registry_stub(port_file.read_text().strip()) as stub:
            watch = stub.Watch(registry_pb2.WatchRequest())
            response = await asyncio.wait_for(watch.read(), 10)
            assert isinstance(response, registry_pb2.WatchResponse)
            os.kill(process.pid, signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 10) == 0
            watch.cancel()
    finally:
        process.kill()
        errors = process.communicate()[1]
    assert "Traceback" not in errors


def test_a_missing_etcd_is_reported_in_one_line() -> None:
    store = f"--store=etcd://127.0.0.1:{free_port()}"
    process = start(store, "--store-start-timeout-s=0.5", "--store-timeout-s=0.4")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    lines = [line for line in errors.splitlines() if line.startswith("headrace-registry:")]
    assert len(lines) == 1
    assert "store: etcd at" in lines[0]
    assert "--store memory" in lines[0]
    assert errors.strip() == lines[0]
