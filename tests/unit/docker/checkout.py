"""A copy of docker/ in which programs of the machine are replaced, for tests of its scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.unit.test_architecture import ROOT

# Far beyond the limits that the tests set, and below the limit of a test.
RUN_TIMEOUT_S: Final = 60
SLEEPS_S: Final = 50


class Checkout:
    """A folder with docker/ and requirements/, and programs that replace those of the machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self._programs = folder / "programs"
        self._programs.mkdir()
        shutil.copytree(ROOT / "docker", self.folder / "docker")
        shutil.copytree(ROOT / "requirements", self.folder / "requirements")

    def program(self, name: str, *lines: str) -> None:
        """A shell script that stands for a program. A path such as .venv/bin/headrace is in the checkout."""
        path = (self.folder if "/" in name else self._programs) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        path.chmod(0o755)

    def run(
        self, script: str, *arguments: str, before: Sequence[str] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script of docker/. `before` is a command that runs it, such as one that hides programs."""
        return subprocess.run(
            [*before, str(self.folder / "docker" / script), *arguments],
            env={"PATH": f"{self._programs}:{os.environ['PATH']}", **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_TIMEOUT_S,
        )
