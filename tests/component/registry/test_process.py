"""The process of the registry starts without its store."""

from __future__ import annotations

import os
import subprocess
import sys

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
