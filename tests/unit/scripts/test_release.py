"""`make release` refuses builds that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

import release


def test_builds_that_differ_are_named(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / "wheel").write_bytes(b"one")
    assert release.compared(*folders) == [folders[0] / "wheel"]
    (folders[1] / "wheel").write_bytes(b"two")
    with pytest.raises(ValueError, match="two builds of wheel differ"):
        release.compared(*folders)
    (folders[1] / "more").touch()
    with pytest.raises(ValueError, match="different files"):
        release.compared(*folders)
