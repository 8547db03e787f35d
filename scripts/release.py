"""Check and build a release without publishing anything: scripts/release.py FOLDER

Compares version, changelog, upgrade notes and tags. Builds the source archive and the wheel twice, in two folders with
another time zone and other file permissions, and compares the bytes. Then it copies them into FOLDER, and prints their
digests and the commands that publish them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_TIMEOUT_S: Final = 300.0
_BUILDS: Final = ((0o022, "UTC"), (0o077, "Asia/Kolkata"))
"""Permissions and time zone of each build."""


def version_of(pyproject: str) -> str:
    """The version in the text of pyproject.toml."""
    return str(tomllib.loads(pyproject)["project"]["version"])


def document_problems(version: str, changelog: str, notes: str) -> Iterator[str]:
    """What keeps this version from being released, by the texts of changelog and upgrade notes."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    wanted = re.compile(rf"\[{re.escape(version)}\] - (?:unreleased|\d{{4}}-\d\d-\d\d)")
    if not titles or not wanted.fullmatch(titles[0]):
        yield f"CHANGELOG.md does not begin with a section [{version}] - DATE, but {titles[:1]}"
    elif not re.search(r"^- ", sections[0], re.MULTILINE):
        yield f"CHANGELOG.md: the section [{version}] has no entry"
    if any("unreleased" in title for title in titles[1:]):
        yield "CHANGELOG.md: an older section is still unreleased"
    if len(titles) > 1:
        minor, older = (".".join(name.split(".")[:2]) for name in (version, _number(titles[1])))
        heading = f"## From {older} to {minor}"
        if older != minor and heading not in notes:
            yield f"docs/upgrading.md has no section {heading!r}"


def _number(title: str) -> str:
    found = re.match(r"\[([^]]+)\]", title)
    return found[1] if found else ""


def tree_problems(root: Path, version: str) -> Iterator[str]:
    """What keeps the checkout from being released, by git."""
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    if changed:
        yield f"files differ from the commit: {', '.join(line[3:] for line in changed.splitlines())}"
    if _git(root, "tag", "--list", f"v{version}"):
        yield f"the tag v{version} exists: raise the version in pyproject.toml"


def build_twice(folder: Path) -> list[Path]:
    """Builds twice and copies the files into `folder`. Raises ValueError naming a file that differs."""
    with tempfile.TemporaryDirectory(prefix="headrace-release-") as name:
        folders = [Path(name) / str(number) for number in range(len(_BUILDS))]
        for target, (umask, zone) in zip(folders, _BUILDS, strict=True):
            subprocess.run(
                [sys.executable, ROOT / "scripts" / "build_dist.py", target],
                env={**os.environ, "TZ": zone},
                umask=umask,
                stdout=subprocess.DEVNULL,
                timeout=_TIMEOUT_S,
                check=True,
            )
        found = compared(*folders)
        folder.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(path, folder)) for path in found]


def compared(first: Path, second: Path) -> list[Path]:
    """The files of the first folder. Raises ValueError unless the second has the same with equal bytes."""
    names = sorted(path.name for path in first.iterdir())
    if names != sorted(path.name for path in second.iterdir()):
        raise ValueError("the two builds have different files")
    for name in names:
        if (first / name).read_bytes() != (second / name).read_bytes():
            raise ValueError(
                f"two builds of {name} differ: something depends on time, place or user"
            )
    return [first / name for name in names]


def wheel_version(wheel: Path) -> str:
    """The version that the unpacked wheel states when it runs."""
    with tempfile.TemporaryDirectory(prefix="headrace-wheel-") as name:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(name)
        ended = subprocess.run(
            [sys.executable, "-m", "headrace_cli", "--version"],
            env={**os.environ, "PYTHONPATH": name},
            cwd=name,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return ended.stdout.split()[-1]


def _git(root: Path, *arguments: str) -> str:
    ended = subprocess.run(
        ["git", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return ended.stdout.rstrip()


def main() -> int:
    """Entry point."""
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} FOLDER", file=sys.stderr)
        return 2
    version = version_of((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    notes = (ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8")
    problems = [*document_problems(version, changelog, notes), *tree_problems(ROOT, version)]
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    if problems:
        return 1
    try:
        files = build_twice(Path(sys.argv[1]))
    except ValueError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    (wheel,) = (path for path in files if path.suffix == ".whl")
    stated = wheel_version(wheel)
    if stated != version:
        print(f"release: the wheel states version {stated}, not {version}", file=sys.stderr)
        return 1
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{digest}  {path.name}  {path.stat().st_size:,} bytes, twice the same")
    print(f"Headrace {version} is ready. Nothing was published. To release it:")
    print(f"  date the section [{version}] of CHANGELOG.md, and commit")
    print("  make protos-baseline, and commit")
    print(f"  git tag --annotate v{version} && git push origin v{version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
