"""The contents of the wheel and of the source archive. `make test-install` installs them."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from pathlib import Path

from build_dist import build
from tests.unit.test_architecture import ROOT


def test_the_wheel_has_packages_types_and_stubs_and_the_source_archive_is_tracked(
    tmp_path: Path,
) -> None:
    archive, wheel = build(tmp_path)
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [*(ROOT / "libs").glob("headrace_*"), *(ROOT / "services").glob("*/headrace_*")]
    for package in sources:
        modules = {
            str(path.relative_to(package.parent))
            for path in package.rglob("*")
            if path.suffix == ".py" or path.name == "py.typed"
        }
        assert modules
        assert modules <= names
    for proto in (ROOT / "protos").rglob("*.proto"):
        stub = str(proto.relative_to(ROOT / "protos")).removesuffix(".proto")
        assert {f"{stub}_pb2{end}" for end in (".py", ".pyi", "_grpc.py", "_grpc.pyi")} <= names
    assert "headrace/py.typed" in names
    tops = {name.partition("/")[0] for name in names}
    (metadata,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops - {metadata} == {"headrace", *(package.name for package in sources)}

    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with tarfile.open(archive) as source:
        files = {m.name.partition("/")[2] for m in source.getmembers() if m.isfile()}
    assert files - {"PKG-INFO"} <= set(listed.stdout.splitlines())
    assert {"pyproject.toml", "LICENSE", "requirements/constraints.txt"} <= files
