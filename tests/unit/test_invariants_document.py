"""docs/invariants.md defines every cited invariant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.unit.test_architecture import ROOT

DOCUMENT = ROOT / "docs" / "invariants.md"
CITED_IN = ("libs", "services", "tests", "docs", "protos", "ARCHITECTURE.md")
SUFFIXES = (".py", ".md", ".proto")
CITATION = re.compile(r"\bI(\d{1,2})\b")
SECTION = re.compile(r"^## I(\d{1,2}): .+?$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def sections() -> dict[int, str]:
    return {int(n): text for n, text in SECTION.findall(DOCUMENT.read_text(encoding="utf-8"))}


def citing_files() -> Iterator[Path]:
    generated = ROOT / "libs" / "headrace"
    for name in CITED_IN:
        for path in (ROOT / name, *(ROOT / name).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and generated not in path.parents:
                yield path


def test_every_cited_invariant_is_defined() -> None:
    defined = sections()
    assert sorted(defined) == list(range(1, 9))
    for path in citing_files():
        cited = {int(number) for number in CITATION.findall(path.read_text(encoding="utf-8"))}
        assert cited <= defined.keys(), f"{path.relative_to(ROOT)} cites {cited - defined.keys()}"
