"""docs/faults.md names tests; they exist, and every demand has one."""

from __future__ import annotations

import ast
import re

import pytest

from tests.unit.test_architecture import REFERENCE, ROOT, defined_names

DOCUMENT = ROOT / "docs" / "faults.md"
DEMANDS = (*range(1, 14), *range(20, 25))


def test_every_demand_names_a_test() -> None:
    rows = dict(
        re.findall(r"^\| (\d+) \|(.*)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert sorted(map(int, rows)) == list(DEMANDS)
    for row in rows.values():
        assert REFERENCE.search(row)


@pytest.mark.parametrize(
    ("file", "name"), sorted(set(REFERENCE.findall(DOCUMENT.read_text(encoding="utf-8"))))
)
def test_the_test_exists(file: str, name: str) -> None:
    assert name in defined_names(ast.parse((ROOT / file).read_text(encoding="utf-8")))
