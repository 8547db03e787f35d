"""The table of bounds in docs/security.md: each setting exists, and each default is that of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from headrace_decode.config import DecodeConfig
from headrace_planner_service.config import PlannerConfig
from headrace_prefill.config import PrefillConfig
from headrace_registry.config import RegistryConfig
from headrace_router.config import RouterConfig
from tests.unit.test_architecture import ROOT

CONFIGS: tuple[type[BaseModel], ...] = (
    RouterConfig,
    DecodeConfig,
    PrefillConfig,
    RegistryConfig,
    PlannerConfig,
)
_UNITS = {"s": 1, "KiB": 2**10, "MiB": 2**20}
_NUMBER = re.compile(r"([0-9][0-9,.]*)(?: (s|KiB|MiB)\b)?")
_NAME = re.compile(r"`([^`]+)`")
_COLUMNS = ["what", "default", "setting", "status"]


def rows() -> list[list[str]]:
    """The rows with a setting."""
    section = (
        (ROOT / "docs" / "security.md").read_text(encoding="utf-8").partition("\n## Bounds\n")[2]
    )
    lines = section.partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    start = cells.index(_COLUMNS)
    table = cells[start + 2 :]
    end = next((i for i, row in enumerate(table) if len(row) != len(_COLUMNS)), len(table))
    return [row for row in table[:end] if row[2] not in ("", "-")]


def number(default: str) -> float:
    """The number with which a default begins, in its base unit."""
    found = _NUMBER.match(default)
    assert found is not None, f"{default!r} begins with no number"
    return float(found[1].replace(",", "")) * _UNITS[found[2] or "s"]


def constant(reference: str) -> float:
    """The value of "file:name"."""
    path, _, name = reference.partition(":")
    tree = ast.parse(Path(ROOT / path).read_text(encoding="utf-8"))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            value: Any = node
            return float(eval(compile(ast.Expression(value.value), path, "eval"), {}))
    raise AssertionError(f"{path} has no {name}")


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_bound_has_the_default_of_its_setting(row: list[str]) -> None:
    what, default, setting, _ = row
    names = _NAME.findall(setting)
    assert names, what
    if ":" in names[0]:
        assert constant(names[0]) == number(default)
        names = names[1:]
    for name in names:
        fields = [config.model_fields[name] for config in CONFIGS if name in config.model_fields]
        assert fields, f"no service has the setting {name}"
        if name in setting[: len(name) + 1]:
            assert {float(field.default) for field in fields} == {number(default)}
