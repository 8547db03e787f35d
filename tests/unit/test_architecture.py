"""ARCHITECTURE.md and docs/ name code and tests; all of them exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "ARCHITECTURE.md"
DOCUMENTS = (DOCUMENT, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
REFERENCE = re.compile(r"`((?:libs|services|scripts|tests|bench)/[\w/.-]+\.py):([\w.]+)`")
CODE_PATH = re.compile(
    r"`((?:libs|services|scripts|tests|bench|protos|docker|requirements)/[\w/.-]+)(?::[\w.]+)?`"
)


def references(document: Path = DOCUMENT) -> list[tuple[str, str]]:
    return sorted(set(REFERENCE.findall(document.read_text(encoding="utf-8"))))


def defined_names(tree: ast.Module) -> set[str]:
    """Top-level functions, classes and constants, and "Class.member" for what classes define."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        if isinstance(node, ast.ClassDef):
            names.update(
                f"{node.name}.{member.name}"
                for member in node.body
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            )
    return names


@cache
def names_in(file: str) -> set[str]:
    return defined_names(ast.parse((ROOT / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_cited_name_exists(document: Path) -> None:
    missing = [
        f"{file}:{name}"
        for file, name in references(document)
        if not (ROOT / file).is_file() or name not in names_in(file)
    ]
    assert not missing, f"{document.name} cites names that do not exist"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_cited_path_exists(document: Path) -> None:
    cited = set(CODE_PATH.findall(document.read_text(encoding="utf-8")))
    assert not [path for path in sorted(cited) if not (ROOT / path).exists()]
