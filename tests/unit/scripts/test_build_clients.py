"""scripts/build_clients.py: what is missing is named, and nothing is built twice."""

from __future__ import annotations

from pathlib import Path

import pytest

import build_clients
from build_clients import BuildError, build, is_built, missing_packages


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a client in the language "shell", which counts its builds."""
    monkeypatch.setattr(build_clients, "SOURCES", tmp_path / "sources")
    monkeypatch.setattr(build_clients, "BUILT", tmp_path / "built")
    folder = tmp_path / "sources/shell"
    folder.mkdir(parents=True)
    (folder / "packages.txt").write_text(
        f"# A comment.\nbash sh\nnot-there no-such-program\nfile {folder}\nno-file {tmp_path}/none\n"
    )
    script = folder / "build.sh"
    script.write_text(
        '#!/bin/sh\nls "$PROTOS/headrace" "$GOOGLEAPIS/google/rpc" && touch "$1/chat" && echo >>"$1/builds"\n'
    )
    script.chmod(0o755)
    return folder


def test_missing_packages_are_named(sources: Path) -> None:
    assert missing_packages("shell") == ["not-there", "no-file"]


def test_a_client_is_built_again_only_from_other_sources(sources: Path) -> None:
    assert not is_built("shell")
    program = build("shell")
    assert is_built("shell")
    assert build("shell") == program
    builds = program.with_name("builds")
    assert builds.read_text() == "\n"
    (sources / "chat.c").write_text("other")
    assert not is_built("shell")
    build("shell")
    assert builds.read_text() == "\n\n"


def test_a_failed_build_shows_its_output_and_counts_for_nothing(sources: Path) -> None:
    (sources / "build.sh").write_text("#!/bin/sh\necho the reason >&2\nexit 3\n")
    with pytest.raises(BuildError, match="the reason"):
        build("shell")
    assert not is_built("shell")
