"""Lock files: every package has hashes, and every command that installs packages demands them."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from lock_requirements import (
    CONSTRAINTS,
    FILES,
    FIXED,
    FOLDER,
    NOT_CONSTRAINED,
    RESOLVED,
    LockError,
    Pin,
    constraints,
    locked_versions,
    parse,
    problem_of,
    render,
    resolved_roots,
    roots_of,
    with_hashes,
)
from package_index import PackageIndex
from tests.unit.test_architecture import ROOT

HASH = "0" * 64
OTHER = "1" * 64
LOCKS = sorted(path for path in FOLDER.glob("*.txt") if path.stem not in CONSTRAINTS)
NODE_FOLDERS = (ROOT, ROOT / "tests" / "clients" / "node")


def test_every_lock_file_is_written_by_the_script() -> None:
    assert {path.stem for path in LOCKS} == {*FILES, *RESOLVED, *FIXED}
    assert {path.stem for path in FOLDER.glob("*")} == {*FILES, *RESOLVED, *FIXED, *CONSTRAINTS}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_have_the_versions_of_their_lock_files(name: str) -> None:
    versions = {
        lock: {package: pin.version for package, pin in parse(_text(lock)).items()}
        for lock in CONSTRAINTS[name][1]
    }
    text = _text(name)

    assert constraints(name, versions) == text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert set(lines) >= {
        f"{package}=={version}"
        for found in versions.values()
        for package, version in found.items()
        if "+" not in version and package not in NOT_CONSTRAINED
    }
    assert not [line for line in lines if line.partition("==")[0] in NOT_CONSTRAINED]
    assert "torch==2.13.0" in lines


def test_extras_include_the_requirements_of_the_extras_in_them() -> None:
    pyproject = {
        "project": {
            "dependencies": ["a>=1"],
            "optional-dependencies": {"small": ["b>=2"], "large": ["headrace[small]", "c>=3"]},
        },
        "dependency-groups": {"tools": ["d==4"]},
    }

    assert roots_of(pyproject, ["headrace[large]", "tools"]) == ["a>=1", "c>=3", "d==4", "b>=2"]
    assert roots_of(pyproject, ["tools"]) == ["d==4"]


def test_a_resolved_file_keeps_its_versions_until_a_range_or_an_installed_version_excludes_them() -> (
    None
):
    locked = {"a": Pin("1.0", (HASH,)), "b": Pin("2.0", (HASH,)), "of-a": Pin("7", (HASH,))}
    current = {"a": "1.0", "b": "2.0", "of-a": "7"}

    kept = resolved_roots(["a>=1,<2", "b>=2"], {"a": "1.0+cpu"}, locked)
    assert kept == ["a==1.0", "b==2.0"]
    assert locked_versions(kept, locked) == current
    raised = resolved_roots(["a>=1,<2", "b>=2"], {"a": "1.1"}, locked)
    assert raised == ["a==1.1", "b==2.0"]
    assert locked_versions(raised, locked) == {}
    excluded = resolved_roots(["a>=1,<2", "b>=3"], {"a": "1.0"}, locked)
    assert excluded == ["a==1.0", "b>=3"]
    assert locked_versions(excluded, locked) == {}


def _text(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_package_has_hashes(path: Path) -> None:
    pins = parse(path.read_text(encoding="utf-8"))
    assert pins
    assert render(path.stem, pins) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    [
        "numpy==2.3.5",
        f"numpy>=2.3.5 --hash=sha256:{HASH}",
        f"numpy==2.3.5 --hash=md5:{HASH[:32]}",
        f"numpy==2.3.5 --hash=sha256:{HASH[:-1]}",
        "--extra-index-url file:///wheels",
        f"numpy @ file:///wheels/numpy.whl --hash=sha256:{HASH}",
    ],
)
def test_a_line_without_version_and_hashes_is_refused(line: str) -> None:
    with pytest.raises(LockError, match="no version with hashes"):
        parse(f"# title\n{line}\n")


def test_check_names_what_is_not_current() -> None:
    pins = {"a": Pin("1.0", (HASH,)), "b": Pin("2.0", (HASH, OTHER))}
    text = render("dev", pins)
    assert problem_of("dev", text, {"a": "1.0", "b": "2.0"}) == ""
    bare = text.replace(f" \\\n    --hash=sha256:{HASH}\nb", "\nb")
    assert problem_of("dev", bare, {"a": "1.0", "b": "2.0"}) == (
        "dev.txt has no version with hashes: a==1.0"
    )
    for versions in ({"a": "1.1", "b": "2.0"}, {"a": "1.0"}, {"a": "1.0", "b": "2.0", "c": "3"}):
        assert problem_of("dev", text, versions) == "dev.txt differs from pyproject.toml"
    assert problem_of("worker-cuda", text, {}) == "worker-cuda.txt differs from pyproject.toml"


def test_an_unchanged_version_keeps_its_hashes() -> None:
    locked = {"a": Pin("1.0", (HASH,)), "b": Pin("2.0", (HASH,))}
    asked: list[tuple[str, str]] = []

    def find(name: str, version: str) -> tuple[str, ...]:
        asked.append((name, version))
        return (OTHER,)

    pins = with_hashes({"a": "1.0", "b": "2.1", "c": "3.0"}, locked, find)
    assert pins == {"a": Pin("1.0", (HASH,)), "b": Pin("2.1", (OTHER,)), "c": Pin("3.0", (OTHER,))}
    assert asked == [("b", "2.1"), ("c", "3.0")]


def _index(*files: tuple[str, str, str | None]) -> PackageIndex:
    """An index of one package with files of (version, name, hash)."""
    candidates = [
        SimpleNamespace(
            version=version,
            link=SimpleNamespace(
                filename=name, hash_name="sha256" if digest else None, hash=digest, is_file=False
            ),
        )
        for version, name, digest in files
    ]
    finder = SimpleNamespace(find_all_candidates=lambda _: candidates)
    return PackageIndex([finder])


def test_wheels_of_the_version_are_preferred_to_source() -> None:
    index = _index(
        ("1.0", "a-1.0.tar.gz", "2" * 64),
        ("1.0", "a-1.0-cp311.whl", OTHER),
        ("1.0", "a-1.0-cp312.whl", HASH),
        ("1.1", "a-1.1-cp311.whl", "3" * 64),
        ("0.9.src", "a-0.9.src.tar.gz", "4" * 64),
    )
    assert index.hashes("a", "1.0") == (HASH, OTHER)
    assert _index(("1.0", "a-1.0.tar.gz", HASH)).hashes("a", "1.0") == (HASH,)


@pytest.mark.parametrize(
    "files, problem",
    [
        ([("1.1", "a-1.1.whl", HASH)], "have no file of a 1.0"),
        ([("1.0", "a.whl", HASH), ("1.0", "a.whl", OTHER)], "offer different files named a.whl"),
        ([("1.0", "a.whl", None)], "states no SHA-256 hash"),
    ],
)
def test_an_index_that_cannot_be_locked_is_refused(
    files: list[tuple[str, str, str | None]], problem: str
) -> None:
    with pytest.raises(SystemExit, match=problem):
        _index(*files).hashes("a", "1.0")


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
