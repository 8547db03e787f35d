"""What `make release` checks before it builds, and that it notices builds that differ."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import release
from tests.unit.test_architecture import ROOT

CHANGELOG = (
    "# Changelog\n\n## [0.2.0] - unreleased\n\n- One.\n\n## [0.1.0] - 2026-11-22\n\n- Zero.\n"
)
NOTES = "# Notes\n\n## From 0.1 to 0.2\n"


def test_this_checkout_has_a_changelog_and_upgrade_notes_of_its_version() -> None:
    version = release.version_of((ROOT / "pyproject.toml").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    notes = (ROOT / "docs" / "upgrading.md").read_text()
    assert list(release.document_problems(version, changelog, notes)) == []


@pytest.mark.parametrize(
    "version,changelog,notes,named",
    [
        ("0.3.0", CHANGELOG, NOTES, "begin with a section [0.3.0]"),
        ("0.2.0", CHANGELOG.replace("unreleased", "soon"), NOTES, "begin with a section"),
        ("0.2.0", CHANGELOG.replace("- One.\n", ""), NOTES, "no entry"),
        ("0.2.0", CHANGELOG.replace("2026-11-22", "unreleased"), NOTES, "still unreleased"),
        ("0.2.0", CHANGELOG, "# Notes\n", "From 0.1 to 0.2"),
        ("0.2.0", "# Changelog\n", NOTES, "begin with a section"),
    ],
)
def test_what_is_missing_is_named(version: str, changelog: str, notes: str, named: str) -> None:
    problem, *_ = release.document_problems(version, changelog, notes)
    assert named in problem


def test_a_complete_release_and_a_patch_without_notes_have_no_problem() -> None:
    assert list(release.document_problems("0.2.0", CHANGELOG, NOTES)) == []
    patch = CHANGELOG.replace("## [0.2.0] - unreleased", "## [0.1.1] - 2026-12-01")
    assert list(release.document_problems("0.1.1", patch, "")) == []


def test_changed_files_and_an_existing_tag_are_named(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, timeout=30)

    git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    assert list(release.tree_problems(tmp_path, "0.2.0")) == []
    git("tag", "v0.2.0")
    (tmp_path / "file").write_text("two")
    changed, tagged = release.tree_problems(tmp_path, "0.2.0")
    assert "file" in changed
    assert "v0.2.0" in tagged


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
