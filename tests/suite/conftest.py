"""Fixtures of the suite."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deployments of tests leave word where nobody else looks."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
