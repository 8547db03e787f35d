"""Follows docs/quickstart-gpu.md literally on two hosts without GPUs: python -m tests.suite.quickstart_gpu.

The hosts are two network namespaces with an /etc of their own. The engine is simulated, and KV moves over TCP. The
program starts itself again in namespaces where it may do this, and names the cause where none are permitted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.documented import blocks_of
from tests.suite.two_hosts import run_block, two_hosts
from tests.unit.test_architecture import ROOT

PAGE: Final = ROOT / "docs" / "quickstart-gpu.md"
ADDRESSES: Final = ("10.0.0.7", "10.0.0.8")
FIRST, SECOND, BOTH = "first host", "second host", "both hosts"
NOT_PERMITTED: Final = 3
"""Exit status where namespaces are not permitted."""
_INSIDE: Final = "HEADRACE_TEST_IN_NAMESPACES"
_NAMESPACES: Final = ("unshare", "--map-root-user", "--net", "--mount")
_ENVIRONMENT: Final = {"MODEL": "sim", "OMP_NUM_THREADS": "1"}
_MEMBERS: Final = ("prefill-0", "decode-0", "router")
_WORKERS: Final = "headrace workers"
_KV: Final = "headrace trace | grep"
_READY_S: Final = 90.0


def follow(folder: Path) -> None:
    """Runs every block of the page, in order."""
    blocks = [block for block in blocks_of(PAGE) if block.runs]
    assert {block.runs for block in blocks} == {FIRST, SECOND, BOTH}
    with two_hosts(folder, ADDRESSES, _ENVIRONMENT) as (first, second):
        shells = {FIRST: first, SECOND: second}
        for block in blocks:
            started_s = time.monotonic()
            if block.runs == BOTH:
                for shell in shells.values():
                    run_block(shell, block)
            else:
                output = run_block(shells[block.runs], block)
                if block.commands[-1] == _WORKERS:
                    assert all(name in output for name in _MEMBERS), output
                    assert output.count("serving") == 2, output
                elif block.commands[-1].startswith(_KV):
                    assert output.split() == ["mooncake/tcp"], output
            took_s = time.monotonic() - started_s
            print(
                f"line {block.line}: {block.runs}, {len(block.commands)} commands, {took_s:.1f} s"
            )


def permitted() -> bool:
    """Whether this user may make the namespaces."""
    try:
        probe = subprocess.run(
            [*_NAMESPACES, "ip", "link", "add", "a0", "type", "veth", "peer", "name", "a1"],
            capture_output=True,
            timeout=_READY_S,
            check=False,
        )
    except FileNotFoundError:
        return False
    return probe.returncode == 0


def main() -> int:
    """Entry point."""
    if _INSIDE not in os.environ:
        if not permitted():
            print("this user may not make network namespaces, or unshare and ip are missing")
            return NOT_PERMITTED
        command = [*_NAMESPACES, sys.executable, "-m", "tests.suite.quickstart_gpu"]
        return subprocess.run(command, env={**os.environ, _INSIDE: "1"}, check=False).returncode
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-hosts-") as name:
        follow(Path(name))
    print(f"the commands of {PAGE.name} run on two hosts: {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
