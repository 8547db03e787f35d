"""Files that are read again when they change."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headrace_common import reloading
from headrace_common.errors import ConfigError
from headrace_common.reloading import ReloadedFiles


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloading, "CHECK_INTERVAL_S", 0.0)


class Number:
    """A number in a file, and how often it was read."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.reads = 0
        path.write_text(text)
        self.file = ReloadedFiles([str(path)], self._read)

    def _read(self) -> int:
        self.reads += 1
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            raise ConfigError(f"{self.path} has no number") from None


def test_only_a_changed_file_is_read_again(tmp_path: Path) -> None:
    number = Number(tmp_path / "number", "1")
    assert [number.file.current(), number.file.current(), number.reads] == [1, 1, 1]
    number.path.write_text("22")
    assert [number.file.current(), number.file.current(), number.reads] == [22, 22, 2]


def test_a_file_is_checked_after_the_interval_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "CHECK_INTERVAL_S", 3_600.0)
    number = Number(tmp_path / "number", "1")
    number.path.write_text("22")
    assert number.file.current() == 1


def test_an_invalid_file_leaves_the_old_value_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    number = Number(tmp_path / "number", "1")
    number.path.write_text("none")
    assert [number.file.current(), number.file.current()] == [1, 1]
    number.path.unlink()
    assert number.file.current() == 1
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "has no number" in errors[0].getMessage()
    number.path.write_text("3")
    assert number.file.current() == 3
