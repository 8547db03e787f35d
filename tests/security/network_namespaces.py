"""Runs modules in network namespaces of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_OWN_NETWORK = ("unshare", "--map-root-user", "--net")
_TIMEOUT_S = 120.0


def require_network_namespaces(*programs: str) -> None:
    """Skips the test where namespaces, or further programs, are missing."""
    missing = [name for name in ("unshare", "ip", *programs) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed")
    probe = subprocess.run(
        [*_OWN_NETWORK, "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if probe.returncode != 0:
        pytest.skip(f"network namespaces are not permitted here: {probe.stderr.strip()}")


def run_alone(module: str, *arguments: str) -> dict[str, Any]:
    """What a module of tests.security prints in a network namespace of its own."""
    ended = subprocess.run(
        [*_OWN_NETWORK, sys.executable, "-m", f"tests.security.{module}", *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
