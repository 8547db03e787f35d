"""The tools that `make test-clients` installs (`scripts/install_client_tools.sh`)."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON_LISTS = ROOT / "tests/clients/python"
NODE_LISTS = ROOT / "tests/clients/agents"


def tools(folder: str, versions: Path) -> tuple[Path, pytest.MarkDecorator]:
    """The folder of installed tools, and the mark of tests that need them at the listed versions."""
    place = ROOT / ".cache" / folder
    copy = place / versions.name
    current = copy.exists() and copy.read_bytes() == versions.read_bytes()
    return place, pytest.mark.skipif(
        not current, reason=f"the tools of {versions.name} are not installed: make test-clients"
    )
