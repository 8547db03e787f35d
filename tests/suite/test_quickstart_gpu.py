"""docs/quickstart-gpu.md, followed literally: what `make test-quickstart` does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.suite.quickstart_gpu import NOT_PERMITTED
from tests.unit.test_architecture import ROOT

LIMIT_S = 400.0


@pytest.mark.timeout(LIMIT_S + 30)
def test_the_commands_of_the_page_run_on_two_hosts() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.suite.quickstart_gpu"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if ended.returncode == NOT_PERMITTED:
        pytest.skip(ended.stdout.strip())
    assert ended.returncode == 0, ended.stdout
    assert "run on two hosts" in ended.stdout
