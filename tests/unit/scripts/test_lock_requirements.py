"""Every command that installs packages demands hashes. `make lint` checks the lock files themselves."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.test_architecture import ROOT

NODE_FOLDERS = (ROOT, ROOT / "tests/clients/node", ROOT / "tests/clients/agents")


def _commands(path: Path) -> list[list[str]]:
    """The words of each line of a shell script or Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n", " ", path.read_text(encoding="utf-8"))
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    commands = []
    for line in lines:
        for part in re.split(r"&&|\|\||;", line):
            lexer = shlex.shlex(part.replace("'", "").replace('"', ""), posix=True)
            lexer.whitespace_split = True
            commands.append(list(lexer))
    return commands


def _installing(path: Path) -> list[list[str]]:
    """The commands that call pip to fetch or install packages."""
    return [
        words
        for words in _commands(path)
        for pip, verb in pairwise(_without_interpreter(words))
        if pip.rpartition("/")[2] == "pip" and verb in ("install", "download", "wheel")
    ]


def _without_interpreter(words: list[str]) -> list[str]:
    """The words less pip's option --python and its value, which stand before the verb."""
    if "--python" not in words:
        return words
    at = words.index("--python")
    return words[:at] + words[at + 2 :]


INSTALLERS = (
    *sorted(path for path in (ROOT / "docker").rglob("*") if path.is_file()),
    *sorted((ROOT / "scripts").glob("*.sh")),
)


def test_every_installation_demands_hashes_or_has_no_index() -> None:
    found = [(path, words) for path in INSTALLERS for words in _installing(path)]
    assert {path.name for path, _ in found} >= {
        "setup.sh",
        "tools.sh",
        "try.sh",
        "router.Dockerfile",
    }
    for path, words in found:
        assert "--no-deps" in words, f"{path.name}: {' '.join(words)}"
        # The last one builds this project: it has no dependency to fetch.
        safe = "--require-hashes" in words or "--no-index" in words or words[-1] == "."
        assert safe, f"{path.name}: {' '.join(words)}"
        if words[-1] == "." or "wheel" in words:
            assert "--no-build-isolation" in words, f"{path.name}: {' '.join(words)}"


def test_no_installer_fetches_files_by_itself() -> None:
    for path in INSTALLERS:
        words = {word for command in _commands(path) for word in command}
        assert not words & {"curl", "wget", "--allow-unauthenticated", "--trusted-host"}, path.name


@pytest.mark.parametrize("folder", NODE_FOLDERS, ids=lambda folder: folder.name)
def test_every_node_package_has_a_hash(folder: Path) -> None:
    wanted = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    packages = json.loads((folder / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    for kind in ("dependencies", "devDependencies"):
        assert packages[""].get(kind, {}) == wanted.get(kind, {})
    for name, package in packages.items():
        assert not name or re.fullmatch(r"sha512-[A-Za-z0-9+/]{86}==", package["integrity"]), name
