"""The files that pip's indices offer for a version of a package, with their hashes.

pip's own finder reads the indices, so a mirror, an extra index, --find-links and certificates work as they do for pip.
pip has no command that lists files, so this uses its internal modules.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name, canonicalize_version

# pip replaces setuptools' distutils in the whole process, so only the commands that need it import it.
if TYPE_CHECKING:
    from pip._internal.index.package_finder import PackageFinder
    from pip._internal.models.link import Link

# requirements/ is for these: CPython on Linux x86-64 with glibc.
PYTHONS = ((3, 11), (3, 12), (3, 13))
_GLIBC_MINOR_MAX = 60
_RESOLVE_TIMEOUT_S = 1800.0
_PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(_GLIBC_MINOR_MAX, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
]


class PackageIndex:
    """Finds the files of packages. The finders are pip's, one for each Python."""

    def __init__(self, finders: list[PackageFinder]) -> None:
        self._finders = finders

    def hashes(self, name: str, version: str) -> tuple[str, ...]:
        """The SHA-256 hashes of the wheels for PYTHONS, sorted; of the source, if there is no wheel.

        Exits when there is no file, or when two indices offer different files of one name.
        """
        wanted = canonicalize_version(version)
        by_file: dict[str, set[str]] = defaultdict(set)
        for finder in self._finders:
            for candidate in finder.find_all_candidates(name):
                if canonicalize_version(str(candidate.version)) == wanted:
                    by_file[candidate.link.filename].add(_sha256_of(candidate.link))
        wheels = {file: hashes for file, hashes in by_file.items() if file.endswith(".whl")}
        chosen = wheels or by_file
        if not chosen:
            raise SystemExit(f"lock: pip's indices have no file of {name} {version} for Linux")
        for file, hashes in chosen.items():
            if len(hashes) > 1:
                raise SystemExit(f"lock: pip's indices offer different files named {file}")
        return tuple(sorted(set().union(*chosen.values())))


@contextmanager
def open_index() -> Iterator[PackageIndex]:
    """pip's indices, as pip's configuration names them."""
    from pip._internal.commands import create_command
    from pip._internal.models.target_python import TargetPython

    logging.getLogger("pip").setLevel(logging.ERROR)
    command = create_command("index")
    options, _ = command.parse_args(["versions", "unused"])
    with command._build_session(options) as session:  # noqa: SLF001
        yield PackageIndex(
            [
                command._build_package_finder(  # noqa: SLF001
                    options=options,
                    session=session,
                    target_python=TargetPython(
                        platforms=_PLATFORMS, py_version_info=version, implementation="cp"
                    ),
                    ignore_requires_python=False,
                )
                for version in PYTHONS
            ]
        )


def resolve(roots: list[str]) -> dict[str, str]:
    """The versions that pip would install for `roots`, of which all are pinned, and their dependencies.

    Installs nothing. "===" excludes builds with a local version, such as 2.13.0+cpu. Exits when pip fails.
    """
    exact = [root.replace("==", "===") for root in roots]
    options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--quiet", "--report=-"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *exact],
        stdout=subprocess.PIPE,
        check=False,
        timeout=_RESOLVE_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise SystemExit("lock: pip cannot resolve " + " ".join(roots))
    chosen = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {canonicalize_name(item["name"]): item["version"] for item in chosen}


def _sha256_of(link: Link) -> str:
    """The hash that the index states, or for a file of this machine that of its content."""
    if link.hash_name == "sha256":
        return str(link.hash)
    if link.is_file:
        with Path(link.file_path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    raise SystemExit(
        f"lock: the index of {link.filename} states no SHA-256 hash: use an index that does"
    )
