"""The metadata of the distribution: ranges and extras."""

from __future__ import annotations

import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_each_extra_for_workers_has_the_mooncake_of_its_devices() -> None:
    builds = {extra: [one for one in _own(EXTRAS[extra]) if "mooncake" in one] for extra in EXTRAS}
    assert {extra: found for extra, found in builds.items() if found} == {
        "sim": ["mooncake-transfer-engine-non-cuda"],
        "vllm-cpu": ["mooncake-transfer-engine-non-cuda"],
        "vllm-cuda": ["mooncake-transfer-engine-cuda13"],
        "vllm-cuda12": ["mooncake-transfer-engine"],
    }


def test_the_table_of_extras_has_the_modules_of_each() -> None:
    assert MODULES.keys() | {"client"} == EXTRAS.keys()
    assert EXTRAS["client"] == []
    distributions = {
        name: {canonicalize_name(each) for each in found}
        for name, found in packages_distributions().items()
    }
    # The builds for CUDA are not installed here, and contain the same modules.
    for_cuda = {"vllm-cuda", "vllm-cuda12"}
    assert {MODULES[extra] for extra in for_cuda} == {MODULES["vllm-cpu"]}
    for extra in MODULES.keys() - for_cuda:
        wanted = _own(EXTRAS[extra]).keys()
        for module in MODULES[extra]:
            assert distributions[module.partition(".")[0]] & wanted, (extra, module)
        covered = [distributions[module.partition(".")[0]] & wanted for module in MODULES[extra]]
        assert set().union(*covered) == set(wanted), extra
