"""The metadata of the distribution: ranges, extras, and what builds it."""

from __future__ import annotations

import tomllib
from importlib.metadata import packages_distributions

import pytest
from google.protobuf import runtime_version
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from headrace_common.extras import MODULES
from tests.unit.test_architecture import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
EVERY = [*PROJECT["dependencies"], *(root for roots in EXTRAS.values() for root in roots)]


def _own(roots: list[str]) -> dict[str, Requirement]:
    found = [Requirement(root) for root in roots]
    return {canonicalize_name(each.name): each for each in found if each.name != PROJECT["name"]}


@pytest.mark.parametrize("root", sorted(set(EVERY)))
def test_every_requirement_is_a_range_with_a_lower_bound(root: str) -> None:
    requirement = Requirement(root)
    if requirement.name == PROJECT["name"]:
        assert requirement.extras <= EXTRAS.keys()
        return
    operators = {each.operator for each in requirement.specifier}
    assert ">=" in operators
    assert operators <= {">=", "<"}


def test_stubs_work_with_the_lowest_grpcio_and_their_tool_is_that_of_the_checkout() -> None:
    built = _own(PYPROJECT["build-system"]["requires"])
    group = _own(PYPROJECT["dependency-groups"]["build"])
    assert {name: next(iter(group[name].specifier)).version for name in built}
    assert all(
        next(iter(group[name].specifier)).version in each.specifier for name, each in built.items()
    )
    assert str(built["grpcio-tools"].specifier) == str(group["grpcio-tools"].specifier)
    (tool,) = built["grpcio-tools"].specifier
    ranges = {name: each.specifier for name, each in _own(EVERY).items()}
    for name in ("grpcio", "grpcio-status", "grpcio-health-checking", "grpcio-reflection"):
        assert {each.version for each in ranges[name] if each.operator == ">="} == {tool.version}


def test_the_lowest_protobuf_runs_the_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    (lowest,) = [
        Version(each.version)
        for each in _own(PROJECT["dependencies"])["protobuf"].specifier
        if each.operator == ">="
    ]
    for name, value in zip(("MAJOR", "MINOR", "PATCH"), lowest.release, strict=True):
        monkeypatch.setattr(runtime_version, name, value)
    stubs = sorted((ROOT / "libs" / "headrace").rglob("*_pb2.py"))
    assert stubs
    for stub in stubs:
        _, found, rest = stub.read_text(encoding="utf-8").partition(
            "_runtime_version.Domain.PUBLIC,"
        )
        assert found
        major, minor, patch = (int(part) for part in rest.split(",")[:3])
        runtime_version.ValidateProtobufRuntimeVersion(
            runtime_version.Domain.PUBLIC, major, minor, patch, "", stub.name
        )


def test_the_table_of_extras_has_the_modules_of_each() -> None:
    assert MODULES.keys() | {"client"} == EXTRAS.keys()
    assert EXTRAS["client"] == []
    distributions = {
        name: {canonicalize_name(each) for each in found}
        for name, found in packages_distributions().items()
    }
    # The builds for CUDA are not installed here, and contain the same modules.
    assert MODULES["vllm-cuda"] == MODULES["vllm-cpu"]
    for extra in MODULES.keys() - {"vllm-cuda"}:
        wanted = _own(EXTRAS[extra]).keys()
        for module in MODULES[extra]:
            assert distributions[module.partition(".")[0]] & wanted, (extra, module)
        covered = [distributions[module.partition(".")[0]] & wanted for module in MODULES[extra]]
        assert set().union(*covered) == set(wanted), extra
