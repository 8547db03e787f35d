"""Build the source archive from what git tracks, and the wheel from that archive: scripts/build_dist.py FOLDER

Uses the hatchling and the compiler of the environment that runs this, and no package index. Files that git ignores or
does not track are never in an archive. The same content gives the same bytes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ("constraints.txt", "constraints-cuda.txt")
_TIMEOUT_S = 300.0


def build(folder: Path) -> tuple[Path, Path]:
    """Writes both archives and the constraints into `folder`, and returns the paths of (source archive, wheel)."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headrace-dist-") as name:
        tree = Path(name) / "tree"
        _copy_tracked(tree)
        archive = _hatchling(tree, "sdist", Path(name) / "sdist")
        # Debian 12's Python 3.11.2 has no filters of tarfile, and newer ones warn without.
        subprocess.run(["tar", "-xf", archive, "-C", name], timeout=_TIMEOUT_S, check=True)
        unpacked = Path(name) / archive.name.removesuffix(".tar.gz")
        wheel = _hatchling(unpacked, "wheel", Path(name) / "wheel")
        for constraints in CONSTRAINTS:
            shutil.copy(unpacked / "requirements" / constraints, folder)
        return Path(shutil.copy(archive, folder)), Path(shutil.copy(wheel, folder))


def _copy_tracked(tree: Path) -> None:
    """Copies the tracked files with their present content."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=_TIMEOUT_S, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file():
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def _hatchling(tree: Path, target: str, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder],
        cwd=tree,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    (built,) = folder.iterdir()
    return built


def main() -> int:
    """Entry point."""
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} FOLDER", file=sys.stderr)
        return 2
    for path in build(Path(sys.argv[1])):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
