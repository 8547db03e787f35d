"""The wheel, installed in environments of its own: the services in one, the client alone in another."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from build_dist import build
from tests.suite.installed import (
    CLIENT,
    CONSTRAINTS,
    SERVICES,
    chat,
    deployed,
    install,
    installed_names,
    run,
)
from tests.unit.test_architecture import ROOT
from tests.wheelhouse import wheelhouse

# What a client needs, and nothing else.
CLIENT_PACKAGES = {
    "googleapis-common-protos",
    "grpcio",
    "grpcio-status",
    "headrace",
    "protobuf",
    "typing-extensions",
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive and the wheel."""
    return build(tmp_path_factory.mktemp("dist"))


def test_the_wheel_has_packages_types_and_stubs_and_the_source_archive_is_tracked(
    dist: tuple[Path, Path],
) -> None:
    archive, wheel = dist
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


@pytest.mark.timeout(400)
def test_a_client_alone_chats_with_installed_services(
    dist: tuple[Path, Path], tmp_path: Path
) -> None:
    wheels = wheelhouse([f"headrace[{extra}]" for extra in SERVICES])
    options: list[str | Path] = ["--no-index", "--find-links", wheels]
    options += ["--constraint", CONSTRAINTS]
    client = install(tmp_path / "client", dist[1], CLIENT, options, sys.executable)
    assert installed_names(client) == CLIENT_PACKAGES
    refused = run(client / "bin" / "headrace", "workers")
    assert refused.returncode == 2
    assert "needs the extra cli" in refused.stderr

    services = install(tmp_path / "services", dist[1], SERVICES, options, sys.executable)
    with deployed(services, tmp_path / "logs") as address:
        answer = chat(client, address)
        assert answer.stdout == "5 tokens\n", answer.stderr
        workers = run(services / "bin" / "headrace", "workers", "--router", address)
        assert "prefill-0" in workers.stdout, workers.stderr
        assert "decode-0" in workers.stdout
