"""Removes from a virtual environment what no service reads: shrink_environment.py ENVIRONMENT

These are the tests of packages, sources in C and Cython, stubs, the debug information of libraries, and what UNUSED
lists. The build of an image runs it. The images of workers with vLLM are left whole, because torch compiles with
headers of its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TEST_FOLDER: Final = "tests"
SUFFIXES: Final = frozenset((".a", ".c", ".cc", ".cpp", ".h", ".hpp", ".pxd", ".pyi", ".pyx"))
UNUSED: Final = (
    "numpy/distutils",
    "numpy/f2py",
    "numpy/fft",
    "numpy/polynomial",
    "numpy/random",
)
"""Compilers, transforms and random numbers of numpy: no service imports them."""
_MOVED: Final = ".libs"
_TESTED: Final = re.compile(r"(_simd|\w+_tests)\..*so$")
_STRIP_TIMEOUT_S: Final = 60.0


def folders_of_tests(packages: Path) -> list[Path]:
    """The outermost folders named `tests` inside of packages. A package with that name itself is left."""
    found = (path for path in sorted(packages.rglob(TEST_FOLDER)) if path.is_dir())
    outer: list[Path] = []
    for path in found:
        if path.parent != packages and not any(path.is_relative_to(other) for other in outer):
            outer.append(path)
    return outer


def unread_files(packages: Path) -> Iterator[Path]:
    """Sources and stubs, which Python does not import, and the modules of numpy that only its tests import."""
    for path in sorted(packages.rglob("*")):
        tested = path.parent == packages / "numpy" / "_core" and _TESTED.match(path.name)
        if path.is_file() and (tested or path.suffix in SUFFIXES):
            yield path


def libraries(packages: Path) -> Iterator[Path]:
    """The shared libraries that can be rewritten, such as x.so and x.so.1.2.

    Those of a package with a folder NAME.libs are left out: auditwheel has moved sections in them, and `strip`
    would break them.
    """
    moved = {path.name.removesuffix(_MOVED) for path in packages.glob(f"*{_MOVED}")}
    for path in sorted(packages.rglob("*.so*")):
        package = path.relative_to(packages).parts[0].removesuffix(_MOVED)
        if path.is_file() and not path.is_symlink() and package not in moved:
            yield path


def shrink(environment: Path) -> int:
    """Returns the bytes that it has removed. Raises CalledProcessError when a library cannot be rewritten."""
    (packages,) = environment.glob("lib/python3*/site-packages")
    before = _bytes_in(packages)
    for folder in folders_of_tests(packages):
        shutil.rmtree(folder)
    for path in (path for pattern in UNUSED for path in packages.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in unread_files(packages):
        path.unlink()
    for library in libraries(packages):
        subprocess.run(
            ["strip", "--strip-unneeded", "--preserve-dates", library],
            check=True,
            timeout=_STRIP_TIMEOUT_S,
        )
    return before - _bytes_in(packages)


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    print(f"removed {shrink(Path(sys.argv[1])) / 1e6:.1f} MB")
