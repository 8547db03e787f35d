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


def test_the_document_follows_a_request_through_every_part() -> None:
    files = {file for file, _ in references()}
    for part in (
        "headrace_router",
        "headrace_decode",
        "headrace_prefill",
        "headrace_kv",
        "headrace_engine",
    ):
        assert any(part in file for file in files), f"ARCHITECTURE.md names no function of {part}"


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


def test_the_table_of_parts_has_every_library_and_service() -> None:
    rows = set(
        re.findall(r"^\| `([\w/.-]+/)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    )
    for row in rows:
        assert (ROOT / row).is_dir(), f"ARCHITECTURE.md names {row}, which does not exist"
    # libs/headrace is generated; a service's folder holds one package.
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for path in (ROOT / "libs").glob("headrace_*/__init__.py")
    }
    services = {f"{path.relative_to(ROOT)}/" for path in (ROOT / "services").iterdir()}
    assert not (packages | services) - rows
