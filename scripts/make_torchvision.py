"""Write build/torchvision: torchvision without its compiled operators, for tests of image models on processors.

The package index may offer only a build for CUDA, which cannot be imported beside torch for processors. Processing of
images needs none of its operators. Add the folder to PYTHONPATH to use it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from model_files import new_directory

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "torchvision"
LOCK = ROOT / "requirements" / "worker-cuda.txt"
# Declares the compiled operators to torch.
DECLARATIONS = "torchvision/_meta_registrations.py"


def requirement() -> str:
    """The locked version, with its hashes."""
    lines = iter(LOCK.read_text(encoding="utf-8").splitlines())
    first = next(line for line in lines if line.startswith("torchvision=="))
    found = [first]
    while found[-1].endswith("\\"):
        found.append(next(lines))
    return "\n".join(found) + "\n"


def unpack(wheel: Path, target: Path) -> None:
    """Writes the wheel's files, but for libraries."""
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".so" not in Path(name).name:
                archive.extract(name, target)
    (target / DECLARATIONS).write_text("", encoding="utf-8")


def main() -> int:
    if not (TARGET / "torchvision").is_dir():
        with tempfile.TemporaryDirectory() as folder, new_directory(TARGET) as target:
            wanted = Path(folder, "wanted.txt")
            wanted.write_text(requirement(), encoding="utf-8")
            pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps"]
            options = ["--require-hashes", "--requirement", str(wanted), "--dest", folder]
            subprocess.run([*pip, *options], check=True)
            unpack(next(Path(folder).glob("torchvision-*.whl")), target)
    print(f"[torchvision] {TARGET} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
