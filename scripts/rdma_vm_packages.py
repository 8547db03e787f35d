"""Copies the installed Python packages that the RDMA test's virtual machines need, without vLLM and torch.

python scripts/rdma_vm_packages.py FOLDER
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

_REQUIREMENTS = ("registry.txt", "router.txt")
# From the workers' requirements, only the packages of the sim engine and its transports, without vLLM and torch.
_MORE = ("mooncake-transfer-engine-non-cuda", "numpy", "xxhash")
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==")
# Mooncake's programs and its store are 80 MB that an engine does not load. The machine unpacks all files, which is slow
# under emulation, so this leaves out files for compilation too.
_LEFT_OUT = re.compile(
    r"^mooncake/(?!([^/]*\.py|engine[^/]*\.so|lib[^/]*\.so|_fast_copy[^/]*\.so)$)"
    r"|^mooncake_.*\.libs/libetcd_wrapper-"
    r"|(^|/)(tests?|include|f2py)/|\.(pyi|pyx|pxd|c|h|a)$|^\.\./"
)


def main() -> None:
    """Copies the packages into the folder."""
    target = Path(sys.argv[1])
    for name in sorted({*_pinned(), *_MORE}):
        try:
            _copy(distribution(name), target)
        except PackageNotFoundError:
            sys.exit(f"{name} is not installed: run make setup")


def _pinned() -> set[str]:
    folder = Path(__file__).resolve().parents[1] / "requirements"
    lines = [line for name in _REQUIREMENTS for line in (folder / name).read_text().splitlines()]
    return {match[1] for line in lines if (match := _PINNED.match(line))}


def _copy(package: Distribution, target: Path) -> None:
    for file in package.files or ():
        source = Path(str(file.locate()))
        if _LEFT_OUT.search(file.as_posix()) or not source.is_file():
            continue
        destination = target / file
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, destination)


if __name__ == "__main__":
    main()
